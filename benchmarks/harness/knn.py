"""The command `bench.py knn`: a kNN language model with and without speculation.

Both variants continue each text in changing order, over the same engine and drafts. The ratio is of
the wall time of whole texts. The row also has the figures of RaLMSpec's formula for the expected
speedup: time of a stride, times of searches by batch, and the share of right speculated lookups.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.pipelines.console.checks import check_output
from ragspec.pipelines.console.options import silence_transformers
from ragspec.pipelines.console.records import option, split, takes_records
from ragspec.pipelines.console.texts import TextColumns, read_texts
from ragspec.sampling.settings import Sampling

if TYPE_CHECKING:
    from ragspec.pipelines.knn.knn_lm import KnnLM

PROMPT = 300  # characters of a prompt
MIN_TEXT = 2 * PROMPT  # least characters of a text
VARIANTS = ("off", "auto")


@dataclass(slots=True)
class Row:
    """The figures of one number of neighbours; seconds by variant and text."""

    k: int
    drafter: str
    lms: dict[str, KnnLM]
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {variant: [] for variant in VARIANTS}
    )
    equal: int = 0
    tokens: int = 0
    hits: int = 0
    guesses: int = 0
    gated: int = 0
    rounds: int = 0
    strides: list[float] = field(default_factory=list)

    def run(self, prompt: str, sampling: Sampling, tokens: int, turn: int) -> None:
        """Continue a text in both variants."""
        generations = {}
        for variant in VARIANTS if turn % 2 else reversed(VARIANTS):
            began = time.perf_counter()
            generations[variant] = self.lms[variant].generate(
                prompt, sampling, max_new_tokens=tokens
            )
            self.seconds[variant].append(time.perf_counter() - began)
        stats = generations["auto"].report.retrieval
        assert stats is not None
        self.equal += generations["off"].tokens == generations["auto"].tokens
        self.tokens += len(generations["auto"].tokens)
        self.hits += stats.hits
        self.guesses += stats.hits + stats.rollbacks
        self.gated += stats.gated
        self.rounds += stats.rounds
        self.strides.append(stats.stride_ms)

    def to_dict(self) -> dict[str, Any]:
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
            "search_ms": self.lms["auto"].schedule.search.medians,
            "hit_share": self.hits / self.guesses if self.guesses else None,
            "gated_share": self.gated / self.rounds if self.rounds else None,
            "seconds": sum(self.seconds["auto"]),
        }


@dataclass(frozen=True, slots=True)
class KnnBenchOptions:
    """The datastore, the texts to continue and the rows to measure."""

    datastore: Path = option(..., "Datastore of `ragspec datastore build`.")
    texts: list[str] = option(..., "Folders or files of texts to continue; repeatable.")
    model: str = option("starter", "Name or folder of the target model.")
    neighbours: str = option("32", "Numbers of neighbours, comma-separated: 32,1024.", "--knn")
    drafters: str = option(
        "none", "Drafters to compare both variants with, comma-separated: none,auto."
    )
    temperature: float = option(0.8, "Temperature of sampling; 0 is greedy.", min=0.0)
    items: int = option(10, "Texts of each row.", min=1)
    tokens: int = option(64, "Most new tokens of a text.", min=1)
    dtype: str = option("float32", "Precision of the weights: float32, bfloat16, float16 or auto.")
    json: Path | None = option(None, "Write the rows to this JSON file.")

    def __post_init__(self) -> None:
        check_output(self.json)
        if not self.sizes:
            raise InputError(
                f"Expected --knn with numbers, got {self.neighbours!r}. Write 32,1024."
            )

    @property
    def sizes(self) -> list[int]:
        """The numbers of neighbours."""
        return [int(each) for each in split(self.neighbours) if each.isdecimal()]


@takes_records
def knn(options: KnnBenchOptions) -> None:
    """Compare a kNN language model that waits for each search with a speculative one."""
    from rich.console import Console

    from ragspec.engine.engine import Engine
    from ragspec.models.load import load_model
    from ragspec.pipelines.knn.knn_lm import KnnLM as AnyLM
    from ragspec.retrievers.knn.datastore import Datastore

    silence_transformers()
    prompts = _prompts(options.texts, options.items)
    store = Datastore.open(options.datastore, verify="size")
    loaded, tokenizer = load_model(options.model, "auto", options.dtype)
    rows: list[dict[str, Any]] = []
    console = Console(width=140)
    with Console(stderr=True).status("opening the datastore") as status:
        for drafter in split(options.drafters):
            engine = Engine(loaded, tokenizer, None if drafter == "none" else drafter)
            for k in options.sizes:
                lms = {
                    variant: AnyLM(engine, store, k=k, speculate=variant) for variant in VARIANTS
                }
                row = Row(k, drafter, lms)
                for lm in lms.values():  # warms up and times tokens and searches
                    sampling = Sampling(options.temperature, seed=0)
                    lm.generate(prompts[-1], sampling, max_new_tokens=24)
                for turn, prompt in enumerate(prompts):
                    status.update(f"k {k}, drafter {drafter}: {turn + 1}/{len(prompts)}")
                    sampling = Sampling(options.temperature, seed=turn)
                    row.run(prompt, sampling, options.tokens, turn)
                rows.append(row.to_dict())
                console.print_json(data=rows[-1])
    if options.json is not None:
        facts = {name: getattr(options, name) for name in ("model", "temperature", "dtype")}
        facts["keys"] = len(store)
        text = json.dumps({"facts": facts, "rows": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


def _prompts(texts: Sequence[str], items: int) -> list[str]:
    """Return the first characters of texts, spread over those that are long enough."""
    strings = (each for each in read_texts(texts, TextColumns()) if isinstance(each, str))
    long = list(islice((each for each in strings if len(each) >= MIN_TEXT), 100 * items))
    if not long:
        raise InputError(
            f"Expected texts of {MIN_TEXT} characters in {', '.join(texts)}, got none. Name others."
        )
    return [each[:PROMPT] for each in long[:: max(1, len(long) // items)][:items]]
