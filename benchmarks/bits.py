"""Whether a chain of tokens has the bits of its tokens one by one on ONNX Runtime.

    OMP_NUM_THREADS=1 python benchmarks/bits.py [--cases 300] [--texts 4] [--length 4000]
                                                [--models smollm2 starter llama mistral qwen2 qwen3]

A case is a length of the text and a width from 1 to 32, both random. The tokens after the text are
verified as one chain, then one forward each. `bits` is the share of cases whose logits are equal
bit for bit, `tokens` of those whose best tokens are. The families by name are small models with
random weights: 2 layers of 256, heads of 32, 8 for queries and 4 for keys.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from torch import Tensor

from ragspec.models.load import load_model
from ragspec.models.quantized import quantized
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_target

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
WIDTHS = (1, 32)
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "sliding_window": None,
}


def model_of(name: str, precision: str) -> Any:
    """Return a model by name, or one of a family with random weights."""
    if name not in FAMILIES:
        return load_model(name, "cpu", precision)[0]
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SHAPE)).eval()
    return quantized(model) if precision == "int8" else model


def cases_of(target: CausalTarget, count: int, length: int, seed: int) -> list[tuple[int, int]]:
    """Return lengths and widths, by length; a case begins where the one before it has ended."""
    draw = random.Random(seed)
    longest = min(length, target.max_length or length) - WIDTHS[1]
    lengths = sorted(draw.sample(range(1, longest), count))
    return [(each, draw.randint(*WIDTHS)) for each in lengths]


def compared(target: CausalTarget, cases: list[tuple[int, int]], seed: int) -> list[list[float]]:
    """Return of each case: equal bits, equal best tokens, and the largest difference."""
    total = sum(cases[-1]) + len(cases) * WIDTHS[1]
    source = torch.Generator().manual_seed(seed)
    text = torch.randint(target.vocab_size, (total,), generator=source).tolist()
    results, at = [], 0
    with target.open(1, total) as session, torch.no_grad():
        for length, width in cases:
            if length > at:
                session.verify([text[at:length]], [DraftTree.empty()])
                session.commit([()])
                at = length
            root, *chain = text[at : at + width]
            (together,) = session.verify([[root]], [DraftTree.chain(chain, "bits")])
            session.discard_uncommitted()
            alone: list[Tensor] = []
            for token in (root, *chain):
                alone += session.verify([[token]], [DraftTree.empty()])
                session.commit([()])
            at, single = at + width, torch.cat(alone)
            tokens = torch.equal(together.argmax(-1), single.argmax(-1))
            error = float((together - single).abs().max())
            results.append([torch.equal(together, single), tokens, error])
    return results


def main() -> None:
    """Compare and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300, help="cases of a model and precision")
    parser.add_argument("--texts", type=int, default=4, help="texts over which they are spread")
    parser.add_argument("--length", type=int, default=4000, help="longest text, in tokens")
    parser.add_argument("--models", nargs="+", default=["starter", *FAMILIES, "smollm2"])
    options = parser.parse_args()
    print("| model | precision | cases | bits | tokens | largest difference |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.models:
        for precision in ("float32", "int8"):
            target = open_target(model_of(name, precision), runtime="onnx")
            results: list[list[float]] = []
            for seed in range(options.texts):
                count = options.cases // options.texts
                cases = cases_of(target, count, options.length, seed)
                results += compared(target, cases, seed)
            bits, tokens, errors = zip(*results, strict=True)
            n = len(results)
            print(
                f"| {name} | {precision} | {n} | {sum(bits) / n:.4f} | {sum(tokens) / n:.4f} | "
                f"{max(errors):.2g} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
