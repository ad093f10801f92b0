"""docs/integrations.md: the snippet of each host runs, where that host is installed."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
SNIPPET = re.compile(r"^## (\S+)\n.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOSTS = {
    "LangChain": "langchain_core",
    "LlamaIndex": "llama_index.core",
    "Haystack": "haystack",
    "lm-eval": "lm_eval",
}
SNIPPETS = dict(SNIPPET.findall(PAGE))


@pytest.mark.parametrize("host", HOSTS)
def test_the_snippet_of_a_host_runs(host: str, tmp_path: Path) -> None:
    pytest.importorskip(HOSTS[host], reason=f"{host} is not installed")
    guide = ROOT / "ragspec" / "starter" / "guide"
    shutil.copytree(guide, tmp_path / "manuals", ignore=shutil.ignore_patterns("*.jsonl"))
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPETS[host], encoding="utf-8")
    run_script(script, cwd=tmp_path)


def test_a_host_that_is_missing_is_named_by_its_extra(tmp_path: Path) -> None:
    """As if none were installed: a module cannot be imported, and says what brings its host."""
    script = tmp_path / "missing.py"
    script.write_text(
        "import sys\n"
        "from importlib import import_module\n"
        "from ragspec.errors import MissingExtraError\n"
        f"for host in {[(name.lower(), module) for name, module in HOSTS.items()]!r}:\n"
        "    sys.modules[host[1].partition('.')[0]] = None\n"
        "    try:\n"
        "        import_module('ragspec.adapters.' + host[0].replace('-', '_'))\n"
        "    except MissingExtraError as error:\n"
        "        print(error)\n"
    )
    message = run_script(script).splitlines()
    assert len(message) == len(HOSTS)
    for host, line in zip(HOSTS, message, strict=True):
        assert f"pip install 'ragspec[{host.lower()}]'" in line
