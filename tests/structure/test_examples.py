"""Every example runs as a user would run it, on the bundled models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "ragspec" / "starter" / "guide"
ARGUMENTS = {"ask_documents.py": [str(GUIDE)]}


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *ARGUMENTS.get(name, [])],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "QUESTIONS": "2"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if name == "generate.py":
        assert "the same tokens: True" in done.stdout
    if name == "demo.py":
        assert "2 of 2 texts equal plain decoding" in done.stdout
    if name == "one_step.py":
        assert "the tokens of plain decoding: True" in done.stdout
