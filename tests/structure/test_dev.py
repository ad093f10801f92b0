"""dev.py: stamps, stages, pins, and the check of the wheel."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.structure import wheel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return dev.py as a module whose checkout is a temporary folder."""
    spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "constraints").mkdir()
    (tmp_path / "constraints" / "tested.txt").write_text("a==1\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    venv, python = tmp_path / ".venv", tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    places = {"ROOT": tmp_path, "VENV": venv, "PYTHON": python, "STAMP": venv / "stamp.json"}
    places["CONSTRAINTS"] = tmp_path / "constraints" / "tested.txt"
    for name, value in places.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.fixture
def installs(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replace set-ups by a list; each entry says whether .venv had moved."""
    instance: list[bool] = []
    monkeypatch.setattr(dev, "make_venv", lambda moved: instance.append(moved))
    monkeypatch.setattr(dev, "must", lambda *command, why: None)
    return instance


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints/tested.txt"])
def test_a_new_requirement_sets_up_again(dev: ModuleType, installs: list[bool], file: str) -> None:
    dev.set_up()
    dev.set_up()
    assert installs == [False]
    (dev.ROOT / file).write_text("changed")
    dev.set_up()
    assert installs == [False, False]


def test_a_copied_checkout_sets_up_again(dev: ModuleType, installs: list[bool]) -> None:
    dev.set_up()
    stamp = dev.STAMP.read_text().replace(str(dev.ROOT), "elsewhere")
    dev.STAMP.write_text(stamp)
    dev.set_up()
    assert installs == [False, True]


def test_a_failed_install_leaves_no_stamp(
    dev: ModuleType, installs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*command: str, why: str) -> None:
        raise dev.Failure(why)

    monkeypatch.setattr(dev, "must", fail)
    with pytest.raises(dev.Failure, match="dependencies"):
        dev.set_up()
    assert not dev.STAMP.exists()


def test_a_failed_stage_fails_the_run_after_the_other_stages(
    dev: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise dev.Failure("3 failed, 9 passed in 1.0s")

    stages: dict[str, Callable[[], str]] = {"first": fail, "second": lambda: "12 passed in 1.0s"}
    assert dev.run_stages(stages) == 1
    closing = capsys.readouterr().out.splitlines()[-2:]
    assert closing[0].startswith("FAILED  first") and "3 failed, 9 passed" in closing[0]
    assert closing[1].startswith("passed  second") and "12 passed" in closing[1]
    assert dev.run_stages({"second": lambda: ""}) == 0


@pytest.mark.parametrize(
    ("body", "code"), [("def test_it():\n    pass\n", 0), ("def test_it():\n    assert 0\n", 1)]
)
def test_a_stage_returns_the_summary_of_pytest(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, body: str, code: int
) -> None:
    monkeypatch.setattr(dev, "PYTHON", sys.executable)
    (dev.ROOT / "test_it.py").write_text(body)
    if code:
        with pytest.raises(dev.Failure, match=r"1 failed in [\d.]+s"):
            dev.pytest(["test_it.py"])
    else:
        assert re.search(r"1 passed in [\d.]+s", dev.pytest(["test_it.py"]))


def test_an_unknown_command_prints_the_usage() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "dev.py", "tset"], capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 2
    assert "dev.py test" in done.stdout


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_continuous_integration_calls_dev_py() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec python3 dev.py test")


def test_the_pins_cover_and_satisfy_every_requirement(dev: ModuleType) -> None:
    pins = {}
    for line in (ROOT / "constraints" / "tested.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (pin,) = requirement.specifier
            assert pin.operator == "==" and "+" not in pin.version, line
            pins[canonicalize_name(requirement.name)] = pin.version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [text for name in dev.EXTRAS.split(",") for text in extras[name]]
    for text in (*project["dependencies"], *used):
        requirement = Requirement(text)
        if requirement.name == "ragspec":  # an extra of ragspec, whose packages are checked too
            assert requirement.extras <= set(extras)
            continue
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def test_packaged_files_are_those_of_rooms_and_starter() -> None:
    files = wheel.packaged_files()
    assert {"ragspec/errors.py", "ragspec/py.typed", "ragspec/visual/__init__.py"} <= files
    assert not [file for file in files if "__pycache__" in file]
    assert any(file.startswith("ragspec/starter/") for file in files)


@pytest.mark.parametrize(
    ("held", "fault"),
    [
        (["ragspec/__init__.py", "pipelines/docqa.py"], r"foreign \['pipelines/docqa.py'\]"),
        (["ragspec-0.1.0.dist-info/METADATA"], r"missing .*'ragspec/errors.py'"),
    ],
)
def test_a_wheel_with_wrong_files_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: list[str], fault: str
) -> None:
    def build(*command: object) -> str:
        with zipfile.ZipFile(tmp_path / "ragspec-0.1.0-py3-none-any.whl", "w") as archive:
            for name in held:
                archive.writestr(name, "")
        return ""

    monkeypatch.setattr(wheel, "run", build)
    with pytest.raises(SystemExit, match=fault):
        wheel.build(tmp_path)


def test_citations_of_the_wheels_answer_must_be_verbatim() -> None:
    text = "[1] The tower is 41 metres high."
    good = {"answer_start": 4, "answer_end": len(text)}
    wheel.check_answer({"answer": text, "citations": [good]})
    with pytest.raises(SystemExit, match="not verbatim"):
        wheel.check_answer({"answer": text, "citations": [good | {"answer_start": 0}]})
    with pytest.raises(SystemExit, match="no answer"):
        wheel.check_answer({"answer": " ", "citations": []})
