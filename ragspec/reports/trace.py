"""The trace of one generation: JSON lines, a header, one line per step, the report last.

The file alone is enough for a page or a figure: it holds the texts of the emitted tokens, and in
its header those of the drafted ones and the names of the documents. It is written after the run.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ragspec.errors import InputError
from ragspec.reports.generation import Generation
from ragspec.reports.report import Report
from ragspec.rules.base import Step
from ragspec.sampling.decoding import Decodes, decoder_of
from ragspec.sampling.text_output import TextOutput
from ragspec.storage.filesystem import read_input, write_output
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.trees.operations import check

FORMAT = "ragspec-trace"
VERSION = 1
HEADER = ("format", "version", "model", "documents", "vocabulary")
# The errors that reading or showing a damaged trace may raise.
DAMAGE = (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was read back.

    Attributes:
        texts: For each step, the texts of the tokens that it emitted.
        vocabulary: Texts of the drafted tokens by id.
        documents: Names of the documents, in the order in which `origin` counts them.
        extra: Further JSON values, such as the question, the citations or a comparison with plain
            decoding.
    """

    steps: tuple[Step, ...]
    texts: tuple[tuple[str, ...], ...]
    report: Report
    vocabulary: Mapping[int, str] = field(default_factory=dict)
    model: str = ""
    documents: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


def step_texts(generation: Generation, tokenizer: Decodes) -> tuple[tuple[str, ...], ...]:
    """Return the texts of the tokens that each step emitted; joined, they end as the text does.

    A character made of several tokens stands at its last one; the others get "".
    """
    output = TextOutput(tokenizer, generation.prompt_tokens, placed=True)
    output.push(generation.tokens)
    end = len(generation.text)
    bounds = [min(start, end) for start in output.starts[:-1]] + [end]
    texts = [generation.text[first:last] for first, last in pairwise(bounds)]
    first = len(texts) - sum(len(step.tokens) for step in generation.steps)
    ends = accumulate((len(step.tokens) for step in generation.steps), initial=first)
    return tuple(tuple(texts[first:last]) for first, last in pairwise(ends))


def write_trace(
    path: Path | str,
    generation: Generation,
    tokenizer: Decodes,
    *,
    model: str = "",
    documents: Sequence[str] = (),
    extra: Mapping[str, object] | None = None,
) -> None:
    """Write the trace of `generation` to `path`; raise InputError if it cannot be written.

    Args:
        tokenizer: A tokenizer, or a function from token ids to text.
        model, documents, extra: See `Trace`.
    """
    mark: dict[str, object] = {"format": FORMAT, "version": VERSION}  # first in every trace
    header = mark | dict(extra or {}) | mark | {"model": model, "documents": list(documents)}
    decoder = decoder_of(tokenizer)
    drafted = {token for step in generation.steps for token in step.tree.tokens.tolist()}
    header["vocabulary"] = {token: decoder.piece(token, skip=True) for token in sorted(drafted)}
    first = generation.steps[0].milliseconds if generation.steps else {}
    # A first step may itself be the prefill.
    clock = 0.0 if "prefill" in first else generation.report.milliseconds.get("prefill", 0.0)
    lines = [header]
    texts = step_texts(generation, tokenizer)
    for index, (step, chunks) in enumerate(zip(generation.steps, texts, strict=True)):
        lines.append(_step_line(index, clock, step, chunks))
        clock += sum(step.milliseconds.values())
    lines.append({"report": generation.report.to_dict()})
    rows = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_output(Path(path), "the trace", rows)


def _step_line(index: int, clock: float, step: Step, texts: Sequence[str]) -> dict[str, object]:
    tree = step.tree
    return {
        "t": round(clock, 4),
        "index": index,
        "sources": list(tree.sources),
        "tokens": tree.tokens.tolist(),
        "parents": tree.parents.tolist(),
        "source": tree.source.tolist(),
        "accept_prob": [round(float(accept_prob), 4) for accept_prob in tree.accept_prob],
        "origin": tree.origin.tolist(),
        "path": list(step.path),
        "emitted": list(step.tokens),
        "texts": list(texts),
        "ms": {stage: round(value, 4) for stage, value in step.milliseconds.items()},
    }


def read_trace(path: Path | str) -> Trace:
    """Return a trace that `write_trace` wrote; raise InputError if it is missing or damaged."""
    lines = list(_lines(Path(path)))
    if not lines or lines[0].get("format") != FORMAT or lines[0].get("version") != VERSION:
        raise InputError(
            f"{str(path)!r} is no trace of version {VERSION}: expected a file that "
            "`ragspec ask --trace FILE` wrote. Write it again with this version."
        )
    try:
        header, body = lines[0], lines[1:-1]
        steps = tuple(_read_step(line) for line in body)
        texts = tuple(tuple(str(piece) for piece in line["texts"]) for line in body)
        words = {int(token): str(text) for token, text in header["vocabulary"].items()}
        report = Report.from_dict(lines[-1]["report"])
        documents = tuple(map(str, header["documents"]))
        extra = {name: value for name, value in header.items() if name not in HEADER}
        return Trace(steps, texts, report, words, str(header["model"]), documents, extra)
    except DAMAGE as error:
        raise damaged(path, error) from error


def damaged(path: Path | str, error: Exception) -> InputError:
    """Return the error for a damaged trace, from the one that reading or showing it raised."""
    return InputError(
        f"the trace {str(path)!r} is damaged ({type(error).__name__}: {error}): expected the "
        "lines that `ragspec ask --trace FILE` writes. Write it again."
    )


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    for number, row in enumerate(read_input(path, "the trace").split("\n"), 1):
        try:
            if row.strip():
                yield {**json.loads(row)}
        except (TypeError, ValueError) as error:
            line = ValueError(f"line {number} is not a JSON object: {error}")
            raise damaged(path, line) from error


def _read_step(line: Mapping[str, Any]) -> Step:
    n = len(line["tokens"])
    tree = DraftTree(
        tokens=np.asarray(line["tokens"], np.int64),
        parents=np.asarray(line["parents"], np.int64),
        accept_prob=np.asarray(line["accept_prob"], np.float32),
        source=np.asarray(line["source"], np.int64),
        origin=np.asarray(line["origin"], np.int64).reshape(n, 2),
        sources=tuple(str(name) for name in line["sources"]),
        kind=DraftKind.SAMPLED,  # the kind is not written; this one allows equal siblings
    )
    check(tree)
    path = tuple(int(node) for node in line["path"])
    if any(not 0 <= i < n or tree.parents[i] != above for above, i in pairwise((ROOT, *path))):
        raise ValueError(f"step {line.get('index')}: {path} is no path in its tree of {n} nodes")
    emitted, texts = tuple(int(token) for token in line["emitted"]), len(line["texts"])
    if texts != len(emitted):
        raise ValueError(f"step {line.get('index')}: {len(emitted)} tokens, but {texts} texts")
    milliseconds = {str(stage): float(value) for stage, value in line["ms"].items()}
    return Step(tree, path, emitted, milliseconds)
