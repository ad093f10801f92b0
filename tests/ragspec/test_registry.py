"""Optional packages: each extra is declared, and errors name it."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from ragspec.errors import MissingExtraError
from ragspec.pipelines.cli.app import main
from ragspec.registry import EXTRAS, for_extra, lazy_exports

ROOT = Path(__file__).parents[2]


DISTRIBUTIONS = {  # of modules with another name
    "PIL": "pillow",
    "faiss": "faiss-cpu",
    "llama_index": "llama-index-core",
    "haystack": "haystack-ai",
    "docx": "python-docx",
    "pptx": "python-pptx",
}
HOSTS = {"vllm", "sglang"}  # programs that import ragspec into their own environment


def declared() -> dict[str, set[str]]:
    """Return the distributions of the base ("") and of each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    pattern = r"[\[<>=~!; ]"
    return {
        extra: {re.split(pattern, text)[0].replace("_", "-") for text in texts}
        for extra, texts in lists.items()
    }


def distribution(module: str) -> str:
    return DISTRIBUTIONS.get(module, module.replace("_", "-"))


def test_every_extra_declares_its_packages() -> None:
    extras = declared()
    for package, extra in EXTRAS.items():
        assert distribution(package) in extras[extra], package


def test_every_import_of_the_library_is_declared() -> None:
    """A module of another distribution is in the base or in the extra that an error would name."""
    extras = declared()
    known = {name for names in extras.values() for name in names}
    folders = [ROOT / "ragspec", *(ROOT / room for room in ("retrievers", "visual", "pipelines"))]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for top in {name.split(".")[0] for name in names}:
                if top in sys.stdlib_module_names or top in {"ragspec", *HOSTS}:
                    continue
                assert distribution(top) in known, f"{path.name} imports {top}: declare it"
                assert distribution(top) in extras[""] or top in EXTRAS or top in UNNAMED, top


# Brought by an extra whose other packages are missed first.
UNNAMED = {"tqdm", "pydantic", "pydantic_core", "starlette", "sse_starlette", "httpx"}


def test_errors_name_the_extra_of_a_missing_package() -> None:
    result = for_extra(ModuleNotFoundError("no", name="diffusers.utils"))
    assert isinstance(result, MissingExtraError)
    assert "pip install 'ragspec[images]'" in str(result)
    other = ModuleNotFoundError("no", name="unknown")
    assert for_extra(other) is other
    assert for_extra(ModuleNotFoundError("no")) is not None


def test_lazy_exports_and_the_command_line_name_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "toy_room", type(sys)("toy_room"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "toy_room").mkdir()
    (tmp_path / "toy_room" / "__init__.pyi").write_text("from .needs import Thing as Thing\n")
    (tmp_path / "toy_room" / "needs.py").write_text("import datasets\n")
    monkeypatch.setattr(sys.modules["toy_room"], "__path__", [str(tmp_path / "toy_room")], False)
    get, _, exported = lazy_exports("toy_room", str(tmp_path / "toy_room" / "__init__.py"))
    assert exported == ["Thing"]
    with pytest.raises(MissingExtraError, match=r"ragspec\[data\]"):
        get("Thing")
    assert main(["store", "build", "hf:set", "--out", str(tmp_path / "corpus")]) != 0
    assert "pip install 'ragspec[data]'" in capsys.readouterr().err
