"""`ragspec bench knn`: a kNN language model with and without speculation.

Each text is continued in both ways, one after the other in changing order, over the same engine and
drafts; the ratio is of the wall-clock of whole texts. Beside it stand the times of a token (a) and
of searches by batch (b), and the share of guesses that were right, by which the formula of RaLMSpec
says what was to be expected.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragspec.errors import InputError
from ragspec.pipelines.console.options import checked_output, parse_drafter, silence_transformers
from ragspec.sampling.settings import Sampling

if TYPE_CHECKING:
    from ragspec.pipelines.knn.knn_lm import KnnLM

PROMPT = 300  # characters of a text that are continued
LEAST = 2 * PROMPT  # characters of a text that is used
WAYS = ("off", "auto")


@dataclass(slots=True)
class Row:
    """One number of neighbours, and what came of it; seconds by text, off and speculative."""

    k: int
    drafter: str
    lms: dict[str, KnnLM]
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {direction: [] for direction in WAYS}
    )
    equal: int = 0
    tokens: int = 0
    hits: int = 0
    guesses: int = 0
    gated: int = 0
    rounds: int = 0
    strides: list[float] = field(default_factory=list)

    def run(self, prompt: str, sampling: Sampling, tokens: int, turn: int) -> None:
        """Continue a text in both ways."""
        instance = {}
        for direction in WAYS if turn % 2 else reversed(WAYS):
            began = time.perf_counter()
            instance[direction] = self.lms[direction].generate(
                prompt, sampling, max_new_tokens=tokens
            )
            self.seconds[direction].append(time.perf_counter() - began)
        message = instance["auto"].report.retrieval
        assert message is not None
        self.equal += instance["off"].tokens == instance["auto"].tokens
        self.tokens += len(instance["auto"].tokens)
        self.hits += message.hits
        self.guesses += message.hits + message.rollbacks
        self.gated += message.gated
        self.rounds += message.rounds
        self.strides.append(message.stride_ms)

    def facts(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        pairs = list(zip(self.seconds["off"], self.seconds["auto"], strict=True))
        return {
            "k": self.k,
            "drafter": self.drafter,
            "texts": len(self.seconds["auto"]),
            "equal": self.equal,
            "tokens": self.tokens,
            "ratio": sum(self.seconds["off"]) / sum(self.seconds["auto"]),
            "ratio_median": median(off / auto for off, auto in pairs),
            "stride_ms": median(self.strides),
            "search_ms": self.lms["auto"].schedule.search.to_dict(),
            "hit_share": self.hits / self.guesses if self.guesses else None,
            "gated_share": self.gated / self.rounds if self.rounds else None,
            "seconds": sum(self.seconds["auto"]),
        }


def knn(
    datastore: Annotated[Path, typer.Option(help="One that `ragspec datastore build` wrote.")],
    texts: Annotated[
        list[str], typer.Option(help="Texts to continue: folders or files; repeatable.")
    ],
    model: Annotated[str, typer.Option(help="Path or name of the target.")] = "starter",
    neighbours: Annotated[str, typer.Option("--knn", help="Neighbours; several: 32,1024.")] = "32",
    drafters: Annotated[
        str, typer.Option(help="Drafters of both ways, one after the other: none,auto.")
    ] = "none",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.8,
    items: Annotated[int, typer.Option(min=1, help="Texts of each row.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a text.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, ...")] = "float32",
    out: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Compare a kNN language model that waits for each search with one that writes on guesses."""
    from rich.console import Console

    from ragspec.engine.engine import Engine
    from ragspec.models.load import load_model
    from ragspec.pipelines.knn.knn_lm import KnnLM as AnyLM
    from ragspec.retrievers.knn.datastore import Datastore as AnyStore

    checked_output(out)
    silence_transformers()
    sizes = [int(each) for each in neighbours.split(",") if each.strip().isdecimal()]
    if not sizes:
        raise InputError(f"--knn is {neighbours!r}; expected numbers such as 32,1024.")
    prompts = _prompts(texts, items)
    store = AnyStore.open(datastore, verify="size")
    loaded, tokenizer = load_model(model, "auto", dtype)
    rows: list[dict[str, Any]] = []
    console = Console(width=140)
    with Console(stderr=True).status("opening the datastore") as status:
        for drafter in drafters.split(","):
            engine = Engine(loaded, tokenizer, parse_drafter(drafter))
            for k in sizes:
                lms = {
                    direction: AnyLM(engine, store, k=k, speculate=direction) for direction in WAYS
                }
                row = Row(k, drafter, lms)
                for lm in row.lms.values():  # warms up, and times tokens and searches
                    lm.generate(prompts[-1], Sampling(temperature, seed=0), max_new_tokens=24)
                for turn, prompt in enumerate(prompts):
                    status.update(f"k {k}, drafter {drafter}: {turn + 1}/{len(prompts)}")
                    row.run(prompt, Sampling(temperature, seed=turn), tokens, turn)
                rows.append(row.facts())
                console.print_json(data=rows[-1])
    if out is not None:
        facts = {"model": model, "keys": len(store), "temperature": temperature, "dtype": dtype}
        text = json.dumps({"facts": facts, "rows": rows}, indent=1)
        out.write_text(text + "\n", encoding="utf-8")


def _prompts(texts: Sequence[str], items: int) -> list[str]:
    """Return the beginnings of some texts, spread over the first ones that are long enough."""
    from ragspec.pipelines.console.texts import TextColumns, read_texts

    result = (each for each in read_texts(texts, TextColumns()) if isinstance(each, str))
    long = list(islice((each for each in result if len(each) >= LEAST), 100 * items))
    if not long:
        raise InputError(
            f"{', '.join(texts)} holds no text of {LEAST} characters; expected some to continue."
        )
    return [each[:PROMPT] for each in long[:: max(1, len(long) // items)][:items]]
