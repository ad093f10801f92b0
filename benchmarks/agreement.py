"""How far int8, int4 and llama.cpp's Q8_0 lie from float32, position by position of documents.

    OMP_NUM_THREADS=1 python benchmarks/agreement.py [--model smollm2] [--positions 3800]

Each is asked for the next token after every prefix of the same texts. `agrees` is the share of
positions whose best token is that of float32. `kl` is the divergence from float32 over its most
likely tokens, the others as one. llama.cpp runs by the package xllamacpp; see `rivals.py`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rivals import served, write_q8_0
from torch import Tensor

from ragspec.models.load import load_model
from ragspec.models.quantized import SMALL
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.open import open_target

LENGTH = 380  # tokens of a text
TOP = 40  # tokens whose probabilities are compared
Rows = Callable[[list[int]], Tensor]  # log-probabilities [T, V] after each token; -inf is unknown


def by_target(model: Any) -> Rows:
    """Return the log-probabilities of a model of ours, one token a forward."""
    target = open_target(model)

    def rows(text: list[int]) -> Tensor:
        with target.open(1, len(text)) as session, torch.no_grad():
            every = []
            for token in text:
                every += session.verify([[token]], [DraftTree.empty()])
                session.commit([()])
            return torch.cat(every).double().log_softmax(-1)

    return rows


def by_llama_cpp(server: Any, vocab_size: int) -> Rows:
    """Return llama.cpp's log-probabilities of its likeliest tokens, as far as it names them."""

    def rows(text: list[int]) -> Tensor:
        out = torch.full((len(text), vocab_size), -torch.inf, dtype=torch.float64)
        for at in range(len(text)):
            body = {"prompt": text[: at + 1], "n_predict": 1, "temperature": 0.0}
            body |= {"n_probs": 10 * TOP, "cache_prompt": True}
            reply = server.handle_completions(body)
            reply = json.loads(reply) if isinstance(reply, str | bytes) else reply
            for each in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                out[at, each["id"]] = each["logprob"]
        return out

    return rows


def compared(ours: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return which best tokens are equal, and the divergences from `ours`, [T] each."""
    top = ours.topk(TOP, -1).indices
    p, q = ours.gather(-1, top).exp(), other.gather(-1, top).exp().clamp_min(1e-9)
    rest = 1 - p.sum(-1), (1 - q.sum(-1)).clamp_min(1e-9)
    kl = (p * (p / q).log()).sum(-1) + rest[0] * (rest[0] / rest[1]).log()
    return ours.argmax(-1) == other.argmax(-1), kl


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--positions", type=int, default=3800)
    parser.add_argument("--texts", type=Path, nargs="+", default=sorted(Path("docs").glob("*.md")))
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, "cpu", "float32")
    truth = by_target(model)
    others = {each: by_target(load_model(options.model, "cpu", each)[0]) for each in SMALL}
    with tempfile.TemporaryDirectory() as folder:
        if find_spec("xllamacpp") is None:
            print("llama.cpp is left out: xllamacpp is not installed", flush=True)
        else:
            file = Path(folder) / "q8_0.gguf"
            write_q8_0(model, tokenizer, file)
            server = served(file, torch.get_num_threads())
            others["llama.cpp Q8_0"] = by_llama_cpp(server, model.config.vocab_size)
        results: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in others}
        done = 0
        for path in options.texts:
            text = tokenizer.encode(path.read_text(encoding="utf-8"))[:LENGTH]
            text = text[: options.positions - done]
            if not text:
                break
            expected, done = truth(text), done + len(text)
            for name, rows in others.items():
                results[name].append(compared(expected, rows(text)))
            print(f"{done} positions", flush=True)
            for name, pairs in results.items():
                same, kl = (torch.cat(each) for each in zip(*pairs, strict=True))
                print(f"  {name:16} agrees {same.double().mean():.4f}  kl {kl.mean():.5f}")


if __name__ == "__main__":
    main()
