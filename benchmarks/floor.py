"""Speculation where there is little to gain: what it may cost against plain decoding.

    python benchmarks/floor.py --model FOLDER --data DIR [--drafters context,auto] [--lengths 2000]

Two kinds of prompt: questions of Spec-Bench whose answers stand nowhere (writing, roleplay,
reasoning), and beginnings of books of so many tokens, to be summarised. A fixed number of tokens
is sampled, since small models loop when greedy; one prompt at a time. Plain decoding and every
drafter take each prompt in turn, beginning with another each time. "to plain" is seconds of plain
decoding over the drafter's, whole runs of all prompts; "decode" the same without the prompts'
forwards; "least" the worst prompt's.
DIR holds spec_bench/ and longdocs/.
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

REQUESTS = ("writing", "roleplay", "reasoning")
PLAIN = "plain"
Times = list[tuple[float, float]]


def questions(folder: Path, tokenizer: Any, most: int) -> list[list[int]]:
    """Return prompts whose answers cannot be copied, as token ids."""
    with (folder / "spec_bench" / "question_dev.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    requests = [row["turns"][0] for row in rows if row["category"] in REQUESTS][:most]
    return [turn_ids(tokenizer, text) for text in requests]


def summaries(folder: Path, tokenizer: Any, lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return beginnings of books with the request to sum them up, as token ids."""
    results = []
    for path in sorted((folder / "longdocs").glob("*.txt.gz"))[:most]:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            ids = tokenizer.encode(file.read(60_000), add_special_tokens=False)
        texts = (tokenizer.decode(ids[2000 : 2000 + length]) for length in lengths)
        results += [turn_ids(tokenizer, f"{text}\n\nSummarize the text above.") for text in texts]
    return results


def measure(
    engines: Mapping[str, Engine], prompts: Sequence[list[int]], tokens: int
) -> Iterator[tuple[str, float, float, int]]:
    """Yield (name, seconds, those of decoding, forwards) for every prompt and engine in turn."""
    names = list(engines)
    for number, prompt in enumerate(prompts):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            sample = Sampling(temperature=FREE_TEMPERATURE, seed=number)
            report = (
                engines[name]
                .generate(prompt, sample, max_new_tokens=tokens, ignore_eos=True)
                .report
            )
            yield name, time.perf_counter() - began, report.decode_seconds, report.forward_passes
        print(f"  prompt {number + 1}/{len(prompts)}, {len(prompt)} tokens", flush=True)


def row(kind: str, name: str, times: Times, plain: Times, share: float) -> str:
    """Return the line of one drafter; share: tokens a forward."""
    whole, decode = (sum(t[i] for t in plain) / sum(t[i] for t in times) for i in (0, 1))
    least = min(p[0] / t[0] for p, t in zip(plain, times, strict=True))
    return f"| {kind} | {name} | {share:.2f} | {whole:.3f} | {decode:.3f} | {least:.3f} |"


def main() -> None:
    """Measure both kinds of prompt and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--drafters", default="context,auto")
    parser.add_argument("--prompts", type=int, default=9, help="of either kind")
    parser.add_argument("--lengths", default="2000,4000,7000", help="of the texts, in tokens")
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
            share = len(prompts) * options.tokens / forwards[name]
            lines.append(row(kind, name, times[name], times[PLAIN], share))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
