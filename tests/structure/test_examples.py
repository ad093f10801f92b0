"""Every example runs as a script on the bundled models."""

from pathlib import Path

import pytest

from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "ragspec" / "starter" / "guide"
ARGUMENTS = {"ask_documents.py": [str(GUIDE)]}


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    script, arguments = ROOT / "examples" / name, ARGUMENTS.get(name, [])
    out = run_script(script, *arguments, cwd=tmp_path, QUESTIONS="2")
    assert out.strip()
    if name == "generate.py":
        assert "the same tokens: True" in out
    if name == "demo.py":
        assert "2 of 2 texts equal plain decoding" in out
    if name == "one_step.py":
        assert "the tokens of plain decoding: True" in out
