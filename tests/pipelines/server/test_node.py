"""Clients of node, where node and their packages are installed (in a folder of NODE_PATH)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from ragspec.engine.engine import Engine
from tests.pipelines.server.test_openai import MESSAGES
from tests.support.served import NAME


@pytest.mark.parametrize("package", ["openai", "@ai-sdk/openai-compatible", "@ai-sdk/openai"])
def test_a_client_of_node_goes_on_with_a_reply(
    client: httpx.Client, instance: Engine, package: str
) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    script = str(Path(__file__).with_name("clients.cjs"))
    command = [node, script, package, f"{client.base_url}/v1", NAME]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if process.returncode == 77:
        pytest.skip(f"{package} is not installed for node")
    assert process.returncode == 0, process.stderr
    first = instance.generate(MESSAGES, max_new_tokens=6).text
    turns = [*MESSAGES, {"role": "assistant", "content": first}, *MESSAGES]
    second = instance.generate(turns, max_new_tokens=6).text
    texts = {"first": first, "second": second, "streamed": second}
    assert json.loads(process.stdout) == texts | {"code": "context_length_exceeded"}
