"""Texts and acceptance of vLLM with our proposer, plain vLLM, and our engine with chains.

    python benchmarks/vllm_chains.py [--model starter] [--drafter auto] [--items 24] [--longest 8]

It needs vLLM (the CPU build with `VLLM_CPU_KVCACHE_SPACE=1`, see docs/engines.md). The prompts are
questions over the bundled documents, greedy, float32, four requests at once. Each part runs in a
separate process. The script exits with 1 if a text of the proposer differs from plain vLLM, or if
the accepted tokens a step are more than 10 % below those of our chains.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PARTS = ("plain", "proposer", "engine")
NEW_TOKENS = 64
MAX_LENGTH = 2048
TOLERANCE = 0.1


def prompts(model: str, items: int) -> list[list[int]]:
    """Return the token ids of questions over the bundled documents."""
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.bench.prompts import DOCQA, bundled_items

    engine = Engine.from_pretrained(model, None)
    questions = [item for item in bundled_items(engine) if item.category == DOCQA]
    return [list(item.prompt) for item in questions[:items]]


def run_vllm(args: argparse.Namespace, proposer: bool) -> dict[str, Any]:
    """Return the texts of vLLM and the proposer's figures."""
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
    outputs = llm.generate(requests, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
    texts = {"texts": [list(each.outputs[0].token_ids) for each in outputs]}
    return (json.loads(stats.read_text()) if proposer else {}) | texts


def run_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Return the texts and figures of our engine with chains, cut from trees of the same size."""
    from ragspec.adapters.vllm import WIDTH
    from ragspec.engine.engine import Engine
    from ragspec.models.load import load_model
    from ragspec.verification.path_rows import PathTarget

    model, tokenizer = load_model(args.model, "cpu", "float32")
    target = PathTarget(model)  # cuts trees to their most likely path
    engine = Engine(target, tokenizer, args.drafter, budget=WIDTH * args.longest)
    texts, steps, accepted = [], 0, 0
    for ids in prompts(args.model, args.items):
        generation = engine.generate(ids, max_new_tokens=NEW_TOKENS)
        texts.append(list(generation.tokens))
        drafted = [step for step in generation.steps if len(step.tree)]
        steps += len(drafted)
        accepted += sum(len(step.path) for step in drafted)
    return {"texts": texts, "steps": steps, "accepted": accepted}


def main() -> int:
    """Run one part, or all of them and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="starter")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--items", type=int, default=24, help="questions")
    parser.add_argument("--longest", type=int, default=8, help="tokens of a chain")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.part:
        if args.part == "engine":
            figures = run_engine(args)
        else:
            figures = run_vllm(args, args.part == "proposer")
        args.out.write_text(json.dumps(figures))
        return 0
    by_part = {}
    for part in PARTS:
        out = Path(tempfile.mkdtemp()) / "part.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        by_part[part] = json.loads(out.read_text())
    plain, ours, chains = (by_part[part] for part in PARTS)
    equal = sum(one == two for one, two in zip(plain["texts"], ours["texts"], strict=True))
    same = sum(one == two for one, two in zip(plain["texts"], chains["texts"], strict=True))
    accepted = ours["accepted"] / ours["steps"]
    expected = chains["accepted"] / chains["steps"]
    tokens = sum(map(len, ours["texts"]))
    print(f"{args.model}, {args.drafter}: {len(plain['texts'])} texts, {tokens} tokens")
    print(f"equal to plain vLLM: {equal}; plain vLLM equal to our engine: {same}")
    print(
        f"accepted a step: {accepted:.2f} in vLLM ({ours['steps']}), {expected:.2f} in our engine"
    )
    return int(equal < len(plain["texts"]) or accepted < (1 - TOLERANCE) * expected)


if __name__ == "__main__":
    sys.exit(main())
