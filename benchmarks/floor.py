"""The cost of speculation against plain decoding if there is little to gain.

    python benchmarks/floor.py --model FOLDER --data DIR [--drafters context,auto] [--lengths 2000]

There are two kinds of prompt: questions of Spec-Bench without an answer to copy (writing, roleplay,
reasoning), and the first tokens of books with a request for a summary. A fixed number of tokens is
sampled, since small models loop when greedy, one prompt at a time. Plain decoding and all drafters
run each prompt in changing order. "to plain" is seconds of plain decoding by those of the drafter
over all prompts, "decode" the same without prefill, "least" the ratio of the worst prompt. DIR
holds spec_bench/ and longdocs/.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragspec.engine.engine import Engine
from ragspec.models.load import load_model
from ragspec.pipelines.bench.prompts import FREE_TEMPERATURE, turn_ids
from ragspec.pipelines.console.options import silence_transformers
from ragspec.sampling.settings import Sampling

CATEGORIES = ("writing", "roleplay", "reasoning")
PLAIN = "plain"
Times = list[tuple[float, float]]


def questions(folder: Path, tokenizer: Any, most: int) -> list[list[int]]:
    """Return token ids of prompts without an answer to copy."""
    with (folder / "spec_bench" / "question_dev.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    texts = [row["turns"][0] for row in rows if row["category"] in CATEGORIES][:most]
    return [turn_ids(tokenizer, text) for text in texts]


def summaries(folder: Path, tokenizer: Any, lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return token ids of the first tokens of books with a request for a summary."""
    prompts = []
    for path in sorted((folder / "longdocs").glob("*.txt.gz"))[:most]:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            ids = tokenizer.encode(file.read(60_000), add_special_tokens=False)
        texts = (tokenizer.decode(ids[2000 : 2000 + length]) for length in lengths)
        prompts += [turn_ids(tokenizer, f"{text}\n\nSummarize the text above.") for text in texts]
    return prompts


def measure(
    engines: Mapping[str, Engine], prompts: Sequence[list[int]], tokens: int
) -> Iterator[tuple[str, float, float, int]]:
    """Yield (name, seconds, decode seconds, forwards) for every prompt and engine."""
    names = list(engines)
    for number, prompt in enumerate(prompts):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            sampling = Sampling(temperature=FREE_TEMPERATURE, seed=number)
            report = (
                engines[name]
                .generate(prompt, sampling, max_new_tokens=tokens, ignore_eos=True)
                .report
            )
            yield name, time.perf_counter() - began, report.decode_seconds, report.forward_passes
        print(f"  prompt {number + 1}/{len(prompts)}, {len(prompt)} tokens", flush=True)


def row(kind: str, name: str, times: Times, plain: Times, per_forward: float) -> str:
    """Return the line of one drafter; `per_forward` is tokens a forward."""
    whole, decode = (sum(t[i] for t in plain) / sum(t[i] for t in times) for i in (0, 1))
    least = min(p[0] / t[0] for p, t in zip(plain, times, strict=True))
    return f"| {kind} | {name} | {per_forward:.2f} | {whole:.3f} | {decode:.3f} | {least:.3f} |"


def main() -> None:
    """Measure both kinds of prompt and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--drafters", default="context,auto")
    parser.add_argument("--prompts", type=int, default=9, help="prompts of each kind")
    parser.add_argument(
        "--lengths", default="2000,4000,7000", help="tokens of the books, comma-separated"
    )
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    silence_transformers()
    model, tokenizer = load_model(options.model, "cpu", "float32")
    lengths = [int(each) for each in options.lengths.split(",") if each]
    books = options.prompts // max(1, len(lengths))
    kinds = {
        "nothing to copy": questions(options.data, tokenizer, options.prompts),
        "long summaries": summaries(options.data, tokenizer, lengths, books),
    }
    lines = ["| prompts | drafter | tokens a forward | to plain | decode | least |"]
    lines.append("| --- " * 6 + "|")
    for kind, prompts in kinds.items():
        print(kind, flush=True)
        engines = {PLAIN: Engine(model, tokenizer, None)}
        engines |= {name: Engine(model, tokenizer, name) for name in options.drafters.split(",")}
        times: dict[str, Times] = defaultdict(list)
        forwards: dict[str, int] = defaultdict(int)
        for name, seconds, decode, passes in measure(engines, prompts, options.tokens):
            times[name].append((seconds, decode))
            forwards[name] += passes
        for name in engines if prompts else ():
            per_forward = len(prompts) * options.tokens / forwards[name]
            lines.append(row(kind, name, times[name], times[PLAIN], per_forward))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
