"""`ragspec generate`: continue a text, or answer it as a chat model, without documents."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.pipelines.cli.show import WARM_UP_TOKENS, OnRead, OnText, Result, run_and_show
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import argument, option, setting, takes_records
from ragspec.pipelines.console.terminal import Terminal

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.sampling.settings import Sampling

NEIGHBOURS, WEIGHT = 32, 0.25


@dataclass(frozen=True, slots=True)
class KnnOptions:
    """The datastore that is mixed into the distribution of every token (kNN-LM)."""

    datastore: Path | None = option(
        None, "Datastore to mix into the distribution of each token (kNN-LM)."
    )
    knn: int = setting(NEIGHBOURS, "With --datastore: neighbours of a token.", least=1)
    knn_weight: float = setting(WEIGHT, "With --datastore: their weight.", least=0.0, most=1.0)
    speculate: str = setting(
        "auto",
        "With --datastore: tokens written on guesses before the search checks them: auto, a "
        "number, or off. The text stays the same.",
    )

    def __post_init__(self) -> None:
        settings = (self.knn, self.knn_weight, self.speculate)
        if self.datastore is None and settings != (NEIGHBOURS, WEIGHT, "auto"):
            raise InputError(
                "Expected --datastore beside knn, knn-weight or speculate, got none. Name one."
            )
        checks.check_store(self.datastore, "datastore")
        checks.check_guesses(self.speculate)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """A text to continue."""

    text: o.TextOptions
    knn: KnnOptions
    prompt: str = argument(..., "Text to continue; - reads standard input.")
    chat: bool = option(False, "Answer the text, in the model's chat template.", "--chat")
    system: str | None = setting(None, o.SYSTEM)
    stop: list[str] = option([], r"Text that ends the output; \n is a line break; repeatable.")

    def __post_init__(self) -> None:
        checks.checked_text(self.prompt)
        if not self.prompt or "" in self.stop:
            what = "stop string" if self.prompt else "prompt"
            raise InputError(f"Expected a {what} of one character at least, got an empty one.")
        if self.chat:
            checks.check_chat_model(self.text.engine.model)
        elif self.system is not None:
            raise InputError("Expected --chat beside system, got none. Add it or leave system out.")

    def stops(self) -> list[str] | None:
        """Return the stop strings with line breaks and tabs; None for those of the model."""
        escapes = {"n": "\n", "t": "\t", "\\": "\\"}
        return [re.sub(r"\\([nt\\])", lambda m: escapes[m[1]], each) for each in self.stop] or None


@takes_records
def generate(options: GenerateOptions) -> None:
    """Continue a text, or with --chat answer it, without documents."""
    text, knn, content = options.text, options.knn, options.prompt
    if content == "-":  # the mark and the line break around a file are not part of the text
        content = checks.checked_text(sys.stdin.read().removeprefix("\ufeff").removesuffix("\n"))
    arguments: dict[str, Any] = {"stop": options.stops(), **text.read_prediction()}
    arguments["max_new_tokens"] = text.sampling.max_new_tokens

    from ragspec.pipelines.answering.answerer import drain

    terminal = Terminal(quiet=text.output.json)
    datastore = None
    if knn.datastore is not None:  # before the model, whose loading takes seconds
        from ragspec.pipelines.knn.knn_lm import KnnLM
        from ragspec.retrievers.knn.datastore import Datastore

        datastore = Datastore.open(knn.datastore)
    with terminal.working("loading the model"):
        engine = text.engine.load_engine(text.stores)
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        prompt = [*system, {"role": "user", "content": content}] if options.chat else content
        if text.output.compare:
            engine.generate(prompt, max_new_tokens=WARM_UP_TOKENS)
            engine.prefix_cache.clear()

    def write(
        engine: "Engine", sampling: "Sampling", on_text: OnText, on_read: OnRead, plain: bool
    ) -> Result:
        every = arguments | {"on_read": on_read}
        if datastore is None:
            generation = drain(engine.stream(prompt, sampling, **every), on_text)
        else:
            with terminal.working("opening the datastore"):
                speculate = "off" if plain else o.number_or_name(knn.speculate)
                lm = KnnLM(engine, datastore, k=knn.knn, weight=knn.knn_weight, speculate=speculate)
            generation = lm.generate(prompt, sampling, stream=on_text, **every)
        fields = {"text": generation.text, "finish_reason": generation.finish_reason}
        return Result(generation, fields, extra={"prompt": content})

    run_and_show(write, engine, text, terminal)
