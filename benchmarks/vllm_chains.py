"""vLLM with our proposer beside plain vLLM and our own engine with chains: texts and acceptance.

    python benchmarks/vllm_chains.py [--model starter] [--drafter auto] [--items 24] [--longest 8]

Run it where vLLM is installed (its CPU build will do, `VLLM_CPU_KVCACHE_SPACE=1`) with ragspec
beside it (docs/engines.md). Questions over the bundled documents, greedy, float32, four texts at
once. Each part runs in a process of its own. Exits with 1 where a text of the proposer is not that
of plain vLLM, or accepted a step is more than 10 % below that of our chains.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PARTS = ("plain", "proposer", "local")
NEW = 64
MAX_LENGTH = 2048
WITHIN = 0.1


def prompts(model: str, items: int) -> list[list[int]]:
    """Return the token ids of questions over the bundled documents."""
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.bench.prompts import DOCQA, bundled_items

    engine = Engine.from_pretrained(model, None)
    requests = [item for item in bundled_items(engine) if item.category == DOCQA]
    return [list(item.prompt) for item in requests[:items]]


def in_vllm(args: argparse.Namespace, proposer: bool) -> dict[str, Any]:
    """Return texts of vLLM, and the proposer's figures."""
    from vllm import LLM, SamplingParams

    from ragspec.models.resolve import resolve_model

    stats = Path(tempfile.mkdtemp()) / "stats.json"
    more: dict[str, Any] = {}
    if proposer:
        more["speculative_config"] = {
            "method": "custom_class",
            "model": "ragspec.adapters.vllm.Proposer",
            "num_speculative_tokens": args.longest,
        }
        more["additional_config"] = {"ragspec": {"drafter": args.drafter, "stats": str(stats)}}
    folder = str(resolve_model(args.model).folder)
    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_LENGTH,
        max_num_seqs=4,
        **more,
    )
    requests = [{"prompt_token_ids": ids} for ids in prompts(args.model, args.items)]
    instance = llm.generate(requests, SamplingParams(temperature=0, max_tokens=NEW))
    record = {"texts": [list(each.outputs[0].token_ids) for each in instance]}
    return (json.loads(stats.read_text()) if proposer else {}) | record


def local(args: argparse.Namespace) -> dict[str, Any]:
    """Return texts and figures of our engine with chains, cut from trees of the same size."""
    from harness.constant_width import ConstantWidthTarget

    from ragspec.adapters.vllm import WIDTH
    from ragspec.engine.engine import Engine
    from ragspec.models.load import load_model

    model, tokenizer = load_model(args.model, "cpu", "float32")
    target = ConstantWidthTarget(model, args.longest + 1)
    engine = Engine(target, tokenizer, args.drafter, budget=WIDTH * args.longest, batch_size=1)
    texts, steps, accepted = [], 0, 0
    for ids in prompts(args.model, args.items):
        instance = engine.generate(ids, max_new_tokens=NEW)
        texts.append(list(instance.tokens))
        drafted = [step for step in instance.steps if len(step.tree)]
        steps += len(drafted)
        accepted += sum(len(step.path) for step in drafted)
    return {"texts": texts, "steps": steps, "accepted": accepted}


def main() -> int:
    """Run one part, or all of them and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--longest", type=int, default=8)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.part:
        instance = local(args) if args.part == "local" else in_vllm(args, args.part == "proposer")
        args.out.write_text(json.dumps(instance))
        return 0
    record = {}
    for part in PARTS:
        out = Path(tempfile.mkdtemp()) / "part.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        record[part] = json.loads(out.read_text())
    plain, ours, chains = (record[part] for part in PARTS)
    equal = sum(one == two for one, two in zip(plain["texts"], ours["texts"], strict=True))
    same = sum(one == two for one, two in zip(plain["texts"], chains["texts"], strict=True))
    a_step = ours["accepted"] / ours["steps"]
    expected = chains["accepted"] / chains["steps"]
    tokens = sum(map(len, ours["texts"]))
    print(f"{args.model}, {args.drafter}: {len(plain['texts'])} texts, {tokens} tokens")
    print(f"equal to plain vLLM: {equal}; plain vLLM equal to our engine: {same}")
    print(f"accepted a step: {a_step:.2f} in vLLM ({ours['steps']}), {expected:.2f} own chains")
    return int(equal < len(plain["texts"]) or a_step < (1 - WITHIN) * expected)


if __name__ == "__main__":
    sys.exit(main())
