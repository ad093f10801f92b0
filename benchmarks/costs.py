"""The cost of the engine itself: host time of a step, the walk with processors, long contexts.

    python benchmarks/costs.py host|walk|long

- host: share of a step outside the model's forward (starter target, context drafter, greedy)
- walk: walk and processors for a chain of 32 nodes of a 32k vocabulary
- long: plain decoding after 8k tokens against transformers, with the starter's architecture and a
  larger position limit
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ragspec.engine.engine import Engine
from ragspec.models.resolve import STARTER
from ragspec.pipelines.bench.prompts import bundled_items
from ragspec.rules.base import Verdict
from ragspec.rules.target_view import RowView
from ragspec.rules.walk import Walk
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import StopRule, StopState
from ragspec.trees.draft_tree import DraftTree

VOCABULARY = 32_000
NODES, FEW = 32, 6


def host(dtype: str) -> dict[str, float]:
    """Return the share of the steps' time outside the model's forwards."""
    engine = Engine.from_pretrained("starter", dtype=dtype)
    spent = [0.0]
    inner = engine.target.forward

    def timed(*arguments: Any) -> torch.Tensor:
        began = time.perf_counter()
        out = inner(*arguments)
        spent[0] += time.perf_counter() - began
        return out

    engine.target.forward = timed  # type: ignore[method-assign]
    shares = []
    for item in bundled_items(engine) * 3:
        if item.fixed:
            continue
        spent[0] = 0.0
        generation = engine.generate(list(item.prompt), max_new_tokens=96, spans=item.spans)
        stages = generation.report.milliseconds
        steps = sum(stages[name] for name in ("draft", "verify", "commit", "host"))
        forwards = 1000 * spent[0] - stages["prefill"]
        shares.append(1.0 - forwards / steps)
    return {"host_share": median(shares), "runs": float(len(shares))}


def walk() -> dict[str, float]:
    """Return milliseconds of a verdict over a chain of 32 nodes, sampled with top-k and top-p.

    walk_ms: all nodes are accepted, so the rule evaluates all 33 positions, one by one. walk_6_ms:
    six are accepted and the rule evaluates 7. together_ms: all 33 positions at once, as on a GPU.
    """
    torch.manual_seed(0)
    logits = torch.randn(NODES + 1, VOCABULARY) * 3
    distribution = TokenDistribution(
        Sampling(temperature=0.8, top_k=50, top_p=0.9), NoiseStream(1), 4
    )
    context = list(range(500))
    stop = StopState(StopRule(frozenset(), 10_000))

    def judge_chain(accepted: int) -> Callable[[], Verdict]:
        tree = DraftTree.chain(chain_tokens(accepted), "benchmark")
        return lambda: Walk().judge(tree, RowView(logits, tree, distribution, stop, context))

    def chain_tokens(accepted: int) -> list[int]:
        path: list[int] = []
        for depth in range(NODES):
            scores = distribution.process(logits[depth : depth + 1], context, [path])
            token = int(distribution.select(scores, [496 + depth]))
            path.append(token if depth < accepted else (token + 1) % VOCABULARY)
        return path

    whole = chain_tokens(NODES)
    prefixes = [whole[:i] for i in range(NODES + 1)]

    def together() -> torch.Tensor:
        return distribution.select(
            distribution.process(logits, context, prefixes), [496 + len(p) for p in prefixes]
        )

    verdicts = {"walk_ms": judge_chain(NODES), f"walk_{FEW}_ms": judge_chain(FEW)}
    assert [len(verdict().path) for verdict in verdicts.values()] == [NODES, FEW]
    timed: dict[str, Callable[[], Any]] = {**verdicts, "together_ms": together}
    return {name: milliseconds(run) for name, run in timed.items()}


def long(dtype: str, length: int = 8192, new: int = 48) -> dict[str, float]:
    """Return the ratio of transformers' seconds a token to ours after a long prompt."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(STARTER / "target")
    config.max_position_embeddings = length + 4096
    torch.manual_seed(0)
    number = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=number).eval()
    peer = copy.deepcopy(model)
    peer.generation_config.eos_token_id = None
    engine = Engine(model, None, drafter=None)
    ids = torch.randint(100, config.vocab_size, (1, length))
    runs = {"hf": lambda n: _hf(peer, ids, n), "ours": lambda n: _local(engine, ids, n)}
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            spent[name].append((seconds(run, new) - seconds(run, 1)) / (new - 1))
    theirs, ours = spent["hf"], spent["ours"]
    return {
        "hf_ms_per_token": 1000 * median(theirs),
        "ms_per_token": 1000 * median(ours),
        "ratio": median(a / b for a, b in zip(theirs, ours, strict=True)),
    }


def _hf(model: Any, ids: torch.Tensor, new: int) -> None:
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)


def _local(engine: Engine, ids: torch.Tensor, new: int) -> None:
    engine.generate(ids, max_new_tokens=new, ignore_eos=True)


def seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """Return the wall seconds of one call."""
    began = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - began


def milliseconds(run: Callable[[], Any], repeats: int = 101) -> float:
    """Return the median milliseconds of a call, after a warm-up."""
    run()
    return 1000 * median(seconds(run) for _ in range(repeats))


def main() -> None:
    """Run one measurement and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("host", "walk", "long"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = {
        "host": lambda: host(options.dtype),
        "walk": walk,
        "long": lambda: long(options.dtype),
    }[options.part]()
    text = json.dumps({"part": options.part, "dtype": options.dtype, **figures})
    print(text)
    if options.json:
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
