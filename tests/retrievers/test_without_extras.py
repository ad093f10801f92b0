"""Drafters work with the packages of the core alone, as inside vLLM or SGLang."""

import json
import subprocess
import sys
from pathlib import Path

BLOCKED = (
    "sentence_transformers", "diffusers", "faiss", "datasets", "lxml", "pypdfium2",
    "docx", "pptx", "openpyxl", "accelerate", "peft", "rich", "typer", "jinja2",
)  # fmt: skip
# It drafts with every method that needs no more than a store.
CODE = """
import importlib, json, pkgutil, sys
for name in {blocked!r}:
    sys.modules[name] = None
from ragspec.errors import MissingExtraError
refused = []
for host in ("vllm", "sglang"):
    importlib.import_module("ragspec.adapters." + host)
for room in ("ragspec.trees", "ragspec.drafters", "ragspec.retrievers"):
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, room + "."):
        try:
            importlib.import_module(module.name)
        except MissingExtraError:
            refused.append(module.name)
from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.drafters.method import Sources, build
from ragspec.registry import names, resolve
from ragspec.retrievers import CorpusIndex
text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
store = CorpusIndex.build([text], 10, sys.argv[1])
drafted = {{}}
for name, place in names("drafter").items():
    if resolve("drafter", name).method.needs <= {{"store"}} and "ragspec.retrievers." in place:
        drafted[name] = []
        for each in build(name, Sources(corpus=store)):
            session = each.open(DraftRequest(tuple(text), 10))
            tree = session.propose(DraftContext(list(text), 10, 9), 6)
            drafted[name].append(tree.tokens.tolist())
print(json.dumps([refused, drafted]))
"""


def test_drafters_work_without_optional_packages(root: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(blocked=BLOCKED), str(tmp_path / "store")],
        capture_output=True, encoding="utf-8", cwd=root, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    refused, drafted = json.loads(done.stdout.splitlines()[-1])
    assert not refused, refused
    learners = {"recycling"}  # it has learned no rows yet
    assert set(drafted) >= {"context", "lookup", "suffix", "rest", "hierarchy", "auto", "select"}
    for name, trees in drafted.items():
        assert (name in learners) == (not any(trees)), name
        assert name in learners or 4 in trees[0], (name, trees)
