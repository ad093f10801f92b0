"""With vLLM itself where it is installed and --slow is given; its CPU build will do."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_text_is_that_of_plain_vllm_and_chains_are_accepted(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "vllm_chains.py"), "--items", "4"],
        capture_output=True, encoding="utf-8", check=False,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to plain vLLM: 4" in done.stdout
