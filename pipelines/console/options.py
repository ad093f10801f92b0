"""The options that several commands share, and the records that group them.

See `records.takes_records`. A check that needs no model runs when a record is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragspec.errors import InputError, ModelError

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.docqa import DocQA
    from ragspec.pipelines.console.terminal import Terminal
    from ragspec.sampling.settings import Sampling

HELP = {"help_option_names": ["-h", "--help"]}  # click alone knows only the long form

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Target model: path, bundled name or hub id.")
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        help="Drafters by name (`ragspec drafters`), comma-separated; the folder of a head "
        "(`ragspec train-head`); or none for plain decoding. Default: auto."
    ),
]
EmbedderOption = Annotated[
    str | None,
    typer.Option(
        help="Embedder: path, package or hub id. Default: the bundled one, or the one that the "
        "index was built with."
    ),
]
BudgetOption = Annotated[str, typer.Option(help="Draft nodes per step: auto, or a number.")]
DeviceOption = Annotated[str, typer.Option(help="Device: auto, cpu, or an accelerator.")]
DtypeOption = Annotated[
    str, typer.Option(help="Data type: auto, float32, bfloat16, float16 or float64.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object only.")]
SystemOption = Annotated[str | None, typer.Option(help="System message of a chat model.")]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The model, its drafters, and the device of both."""

    model: ModelOption = "starter"
    draft_model: Annotated[
        str | None, typer.Option(help="Smaller model of the same vocabulary that drafts too.")
    ] = None
    drafter: DrafterOption = None
    budget: BudgetOption = "auto"
    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    device_map: Annotated[
        str | None, typer.Option(help="Spread the model over devices: auto or balanced.")
    ] = None
    adapter: Annotated[
        Path | None, typer.Option(help="Folder of an adapter saved by peft.", file_okay=False)
    ] = None
    quantize: Annotated[
        str | None, typer.Option(help="Store the weights in fewer bits: int8 (weight-only).")
    ] = None
    static: Annotated[
        str,
        typer.Option(
            help="Steps of fixed shape, for accelerators: auto (graph on CUDA), graph, compile, "
            "off."
        ),
    ] = "auto"

    def load_engine(self, stores: StoreOptions | None = None) -> Engine:
        """Load the models and open the stores.

        Raises:
            ModelError: The model has no tokenizer; also the errors of `Engine.from_pretrained` and
                `open_sources`.
        """
        from ragspec.drafters.build import check_draft_model
        from ragspec.engine import engine
        from ragspec.models.load import load_model
        from ragspec.pipelines.methods import compose, drafts_with_model, open_sources

        silence_transformers()
        model, tokenizer = load_model(
            self.model,
            self.device,
            self.dtype,
            device_map=self.device_map,
            adapter=self.adapter,
            quantize=self.quantize,
        )
        stores = stores or StoreOptions()
        sources = open_sources(
            stores.store, stores.history, tokenizer=tokenizer, model=model, scope=stores.tenant
        )
        names = parse_drafter(self.drafter or "auto")
        draft_model = None
        if self.draft_model is not None:
            draft_model = load_model(self.draft_model, self.device, self.dtype)
        if draft_model is not None and drafts_with_model(names):
            draft, draft_tokenizer = draft_model
            size = int(model.config.get_text_config().vocab_size)
            check_draft_model(draft, draft_tokenizer, tokenizer, size)
            sources, draft_model = replace(sources, draft_model=draft), None
        if tokenizer is None:
            raise ModelError(
                f"{self.model} holds no tokenizer; expected tokenizer.json beside the weights. "
                "Save it there with tokenizer.save_pretrained(folder)."
            )
        return engine.Engine(
            model,
            tokenizer,
            compose(names, sources, model),
            draft_model,
            number_or_name(self.budget),
            static=self.static,
        )


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Stored text to draft from."""

    store: Annotated[
        Path | None,
        typer.Option(help="Corpus to draft from, made by `ragspec store build`.", file_okay=False),
    ] = None
    history: Annotated[
        Path | None,
        typer.Option(
            help="Answers of this model, made by `ragspec store from-answers`.", file_okay=False
        ),
    ] = None
    tenant: Annotated[
        str, typer.Option(help="Tenant whose stored text may be used, in addition to shared text.")
    ] = "global"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling settings, and the most new tokens."""

    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0 always takes the most probable token.")
    ] = 0.0
    top_p: Annotated[float, typer.Option(help="Keep the tokens that make up this probability.")] = (
        1.0
    )
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0
    use_generation_config: Annotated[
        bool,
        typer.Option(
            "--use-generation-config", help="Sample as the model's generation config says."
        ),
    ] = False
    seed: Annotated[
        int | None, typer.Option(help="Random seed. Chosen at random and reported if omitted.")
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most new tokens. Default: 160 over documents, else 256 or what fits."
        ),
    ] = None

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> Sampling:
        """Return the sampling settings; raise SamplingError for values outside their range."""
        from ragspec.sampling.settings import Sampling

        return Sampling(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed
        )

    def settings_for(self, engine: Engine) -> Sampling:
        """Return the settings of the options, or of the model's generation config."""
        from ragspec.sampling.settings import Sampling

        if not self.use_generation_config:
            return self.settings()
        if replace(self.settings(), seed=None) != Sampling():
            raise InputError(
                "Expected --use-generation-config alone, got it with --temperature, --top-p or "
                "--top-k. Leave one out."
            )
        return Sampling.from_generation_config(engine.target.generation_config, seed=self.seed, n=1)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options of the output."""

    json: JsonOption = False
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also run without speculation and compare time and tokens."),
    ] = False
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a trace to this file, for `ragspec report`.", dir_okay=False),
    ] = None
    no_stream: Annotated[
        bool,
        typer.Option("--no-stream", help="Show the whole text at its end, coloured by source."),
    ] = False

    def __post_init__(self) -> None:
        checked_output(self.trace)

    @property
    def streams(self) -> bool:
        """Whether to show text as it is written; not with --compare, as showing takes time."""
        return not (self.no_stream or self.json or self.compare)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The documents that are searched."""

    docs: Annotated[
        list[Path] | None,
        typer.Option("--docs", "-d", help="Folder or file of documents; repeatable."),
    ] = None
    index: Annotated[Path | None, typer.Option(help="Index built by `ragspec index`.")] = None
    embedder: EmbedderOption = None

    def __post_init__(self) -> None:
        if self.docs and self.index:
            raise InputError("Expected one of --docs and --index, got both. Leave one out.")

    def expect_any(self) -> None:
        """Raise InputError unless documents are named."""
        if not self.docs and self.index is None:
            raise InputError(
                "Expected one of --docs and --index, got neither: --docs FOLDER reads documents, "
                "--index FOLDER opens what `ragspec index` built."
            )

    def open(self, terminal: Terminal) -> DocQA | None:
        """Return the pipeline over the documents, None if none are named."""
        if not self.docs and self.index is None:
            return None
        from ragspec.pipelines.answering.docqa import DocQA
        from ragspec.retrievers.search.dense import DEFAULT_EMBEDDER

        if self.index is not None:
            return DocQA.from_index(self.index, embedder=self.embedder)
        qa = DocQA.from_documents(self.docs or [], embedder=self.embedder or DEFAULT_EMBEDDER)
        for skipped in qa.skipped:
            terminal.note_skipped(skipped.path, skipped.reason)
        return qa


@dataclass(frozen=True, slots=True)
class DocumentOptions(SearchOptions):
    """The documents that are searched, and the prompt over them."""

    top_passages: Annotated[
        int | None,
        typer.Option(min=1, help="Passages in the prompt. Default: 3, or 1 for small chat models."),
    ] = None
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Prompt template: evidence, quote, answer, or a Jinja file. Default: answer for "
            "chat models, evidence for others."
        ),
    ] = None
    system: SystemOption = None

    def __post_init__(self) -> None:
        SearchOptions.__post_init__(self)
        if self.prompt is not None:
            from ragspec.pipelines.answering.template import find_template

            find_template(self.prompt, self.system)


@dataclass(frozen=True, slots=True)
class PredictionOptions:
    """A text that the output will resemble."""

    prediction: Annotated[
        str | None,
        typer.Option(help="Text that the output will resemble, to copy from; @FILE reads it."),
    ] = None

    def read(self, engine: EngineOptions) -> dict[str, str]:
        """Return the keywords of `Engine.generate`: none, or the prediction, read from @FILE.

        Raises:
            InputError: The file is unreadable, or there is no drafter to copy the text.
        """
        text = self.prediction
        if text is None:
            return {}
        plain = engine.drafter and parse_drafter(engine.drafter) is None
        if plain and engine.draft_model is None:
            raise InputError(
                f"Expected a drafter beside --prediction, got --drafter {engine.drafter}, which "
                "copies from no text. Leave one out."
            )
        if not text.startswith("@"):
            return {"prediction": checked_text(text)}
        try:
            return {"prediction": Path(text[1:]).read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"Expected a text file in UTF-8 as --prediction, got {text[1:]} ({error})."
            ) from error


def silence_transformers() -> None:
    """Turn off progress bars and warnings of transformers; errors still show."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def checked_text(text: str) -> str:
    """Return the text; raise InputError for bytes of the shell that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Expected text in UTF-8, got other bytes ({error}).") from error
    return text


def checked_output(path: Path | None) -> Path | None:
    """Return the path; raise InputError, before any work, if its folder is missing."""
    if path is not None and not path.parent.is_dir():
        raise InputError(
            f"{path} cannot be written: there is no folder {path.parent}. Make it, or name "
            "another file."
        )
    return path


def parse_drafter(text: str) -> Any:
    """Return the `drafter` argument of an engine: None, a name, or a list of names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or names == ["none"]:
        return None
    return names[0] if len(names) == 1 else names


def number_or_name(text: str) -> str | int:
    """Return the text as a number if it is one, else unchanged."""
    return int(text) if text.isdecimal() else text
