"""The options that several commands share, and what they are turned into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragspec.errors import InputError, ModelError

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.sampling.settings import Sampling

HELP = {"help_option_names": ["-h", "--help"]}  # click itself knows the long one alone

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Path, bundled name or hub id of the target model.")
]
DraftModelOption = Annotated[
    str | None, typer.Option(help="A smaller model of the same vocabulary that drafts too.")
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        help="What drafts: names that `ragspec drafters` lists, several with commas; the folder of "
        "a head (`ragspec train-head`); or none: plain decoding. Without it: auto."
    ),
]
EmbedderOption = Annotated[
    str | None,
    typer.Option(
        help="An embedder: path, package or hub id. Without it the bundled one, or the one that an "
        "index was built with."
    ),
]
BudgetOption = Annotated[str, typer.Option(help="Draft nodes a step: auto, or a number.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, or an accelerator.")]
DeviceMapOption = Annotated[
    str | None, typer.Option(help="Spread a large model over devices: auto, balanced.")
]
AdapterOption = Annotated[
    Path | None, typer.Option(help="The folder of an adapter that peft saved.", file_okay=False)
]
QuantizeOption = Annotated[
    str | None, typer.Option(help="Keep the weights in fewer bits: int8 (weight-only).")
]
StaticOption = Annotated[
    str,
    typer.Option(
        help="Steps of fixed shape, for accelerators: auto (graph on CUDA), graph, compile, off."
    ),
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", "-t", help="0 always takes the most probable token.")
]
TopPOption = Annotated[float, typer.Option(help="Keep the tokens that make up this probability.")]
TopKOption = Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")]
SeedOption = Annotated[
    int | None, typer.Option(help="The text is a function of it; drawn and reported if absent.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and no more.")]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="Decode plainly too: both times, are the tokens equal?")
]
TraceOption = Annotated[
    Path | None, typer.Option(help="Write the trace here, for `ragspec report`.", dir_okay=False)
]
NoStreamOption = Annotated[
    bool, typer.Option("--no-stream", help="Show the text when it is whole, coloured by source.")
]

StoreOption = Annotated[
    Path | None,
    typer.Option(help="A corpus of `ragspec store build`, to draft from.", file_okay=False),
]
HistoryOption = Annotated[
    Path | None,
    typer.Option(help="Answers of this model (`ragspec store from-answers`).", file_okay=False),
]
TenantOption = Annotated[
    str, typer.Option(help="Tenant whose stored text may be used, in addition to shared text.")
]
PassagesOption = Annotated[
    int | None,
    typer.Option(min=1, help="Passages to show the model; 3 without it, 1 for small chat models."),
]
SystemOption = Annotated[
    str | None, typer.Option(help="What a chat model is told before anything else.")
]
GenerationConfigOption = Annotated[
    bool,
    typer.Option("--use-generation-config", help="Sample as the model's generation config says."),
]
PredictionOption = Annotated[
    str | None,
    typer.Option(help="A text that the output will resemble, to copy from; @FILE reads it."),
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine is made."""

    model: str
    draft_model: str | None
    drafter: str | None
    budget: str
    device: str
    dtype: str
    store: Path | None = None
    history: Path | None = None
    scope: str = "global"
    device_map: str | None = None
    adapter: Path | None = None
    quantize: str | None = None
    static: str = "auto"

    def engine(self) -> Engine:
        """Load the models and open the stores.

        Raises what `Engine.from_pretrained` and `open_sources` do, and ModelError where there is no
        tokenizer.
        """
        from ragspec.drafters.build import check_draft_model
        from ragspec.engine.engine import Engine as AnyEngine
        from ragspec.models.load import load_model
        from ragspec.pipelines.methods import compose, drafts_with_model, open_sources

        be_quiet()
        model, tokenizer = load_model(
            self.model,
            self.device,
            self.dtype,
            device_map=self.device_map,
            adapter=self.adapter,
            quantize=self.quantize,
        )
        sources = open_sources(
            self.store, self.history, tokenizer=tokenizer, model=model, scope=self.scope
        )
        names = drafter_of(self.drafter or "auto")
        draft_model = None
        if self.draft_model is not None:
            draft_model = load_model(self.draft_model, self.device, self.dtype)
        if draft_model is not None and drafts_with_model(names):
            draft, draft_tokenizer = draft_model
            size = int(model.config.get_text_config().vocab_size)
            check_draft_model(draft, draft_tokenizer, tokenizer, size)
            sources, draft_model = replace(sources, draft_model=draft), None
        drafter = compose(names, sources, model)
        budget = budget_of(self.budget)
        engine = AnyEngine(model, tokenizer, drafter, draft_model, budget, static=self.static)
        if engine.tokenizer is None:
            raise ModelError(
                f"{self.model} holds no tokenizer; expected tokenizer.json beside the weights. "
                "Save it there with tokenizer.save_pretrained(folder)."
            )
        return engine


def be_quiet() -> None:
    """Keep transformers' bars and remarks off the terminal; errors still show."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def checked_text(text: str) -> str:
    """Return the text; raises InputError where the shell handed on bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the text is not UTF-8 ({error}); expected text.") from error
    return text


def checked_output(path: Path | None) -> Path | None:
    """Return the path; raises InputError, before any work, where its folder is missing."""
    if path is not None and not path.parent.is_dir():
        raise InputError(
            f"{path} cannot be written: there is no folder {path.parent}; make it, or name "
            "another file."
        )
    return path


def prediction_of(
    text: str | None, drafter: str | None = None, draft_model: str | None = None
) -> str | None:
    """Return the predicted text, read from the file that `@FILE` names.

    drafter, draft_model: the options beside it. Raises InputError where that file cannot be read as
    UTF-8, and where there is no drafter to copy the text.
    """
    if text is not None and drafter and drafter_of(drafter) is None and draft_model is None:
        raise InputError(
            f"got --prediction and --drafter {drafter}, which copies from no text; expected one: "
            "leave the other out."
        )
    if text is None or not text.startswith("@"):
        return text if text is None else checked_text(text)
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the prediction {text[1:]} cannot be read ({error}); expected a text file in UTF-8."
        ) from error


def strides_of(text: str) -> str | int:
    """Return what `--speculate` names: auto, off, or a number of strides."""
    return int(text) if text.isdecimal() else text


def check_iterative(
    iterative: bool, alone: Mapping[str, Any], passages: int | None, follow_up: bool
) -> None:
    """Raise InputError for options that do not go together with `--iterative`, or without it.

    alone: options that mean nothing without it, by name, None where one was not given.
    """
    for name, inputs in alone.items():
        if inputs is not None and not iterative:
            raise InputError(f"got {name} without --iterative; expected both, or neither.")
    if iterative and passages not in (None, 1):
        raise InputError(
            f"got --iterative with --top-passages {passages}; expected one passage at a time. "
            "Leave --top-passages out."
        )
    if iterative and follow_up:
        raise InputError(
            "got --iterative with --follow-up; expected one of them: a conversation keeps its "
            "passages."
        )


def check_long(long: bool, alone: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Raise InputError for options that do not go together with `--long`, or without it.

    alone: options that mean nothing without it; others: that mean nothing beside it. By name, None
    where one was not given.
    """
    for name, inputs in (others if long else alone).items():
        if inputs is not None:
            direction = "with" if long else "without"
            rest = "it reads one document as a whole" if long else "expected both, or neither"
            raise InputError(f"got {name} {direction} --long; {rest}. Leave one of them out.")


def drafter_of(text: str) -> Any:
    """Return what the engine takes as a drafter: None, a name, or a list of names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or names == ["none"]:
        return None
    return names[0] if len(names) == 1 else names


def budget_of(text: str) -> str | int:
    """Return a number where the text is one, else the text: the engine knows its policies."""
    return int(text) if text.isdecimal() else text


def sampling_of(temperature: float, top_p: float, top_k: int, seed: int | None) -> Sampling:
    """Return the settings. Raises SamplingError for values outside their range."""
    from ragspec.sampling.settings import Sampling as AnySampling

    return AnySampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
