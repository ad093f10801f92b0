"""The options that several commands share, and the records that group them.

See `records.takes_records`. A check that needs no model runs when a record is created.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Unpack, cast

from typer import Option

from ragspec.errors import InputError
from ragspec.models import checks as models
from ragspec.models.vocabulary import check_saved_draft
from ragspec.pipelines.answering.template import find_template
from ragspec.pipelines.console import checks
from ragspec.pipelines.console.records import option, setting, split
from ragspec.pipelines.console.terminal import Terminal, progress
from ragspec.retrievers.search.documents import load_documents
from ragspec.sampling.settings import Sampling
from ragspec.storage.filesystem import read_input
from ragspec.storage.store import checked_scope, is_store

if TYPE_CHECKING:
    from ragspec.drafters.method import Sources
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.docqa import DocQA, PromptSettings
    from ragspec.types import Tokenizer
    from ragspec.verification.causal import CausalTarget

OF_MODEL = "model"  # the temperature of the model's generation config

ModelOption = Annotated[
    str, Option("--model", "-m", help="Target model: path, bundled name or hub id.")
]
EMBEDDER = "Embedder: path, package or hub id. Default: the bundled one, or that of the index."
EmbedderOption = Annotated[str | None, Option(help=EMBEDDER)]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object only.")]
SYSTEM = "System message of a chat model."
PROMPT = (
    "Prompt template: evidence, quote, answer, extract (the documents' sentences, without the "
    "model), or a Jinja file. Default: answer for chat models, evidence for others."
)


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """The device of models and their data type."""

    device: str = setting("auto", "Device: auto, cpu, or an accelerator such as cuda.")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64", "int8", "int4"] = setting(
        "auto", "Data type: auto, float32, bfloat16, float16, float64; or int8 or int4 weights."
    )

    def __post_init__(self) -> None:
        models.check_place(self.device)


@dataclass(frozen=True, slots=True)
class EngineOptions(PlaceOptions):
    """The model, its drafters, and the device of both."""

    model: ModelOption = "starter"
    draft_model: str | None = option(None, "Smaller model of the same vocabulary that drafts too.")
    drafter: str = option(
        "auto",
        "Drafters by name (`ragspec drafters`), comma-separated; the folder of a head "
        "(`ragspec train-head`); or none for plain decoding.",
    )
    budget: str = option("auto", "Draft nodes per step: auto, or a number.")
    device_map: str | None = setting(None, "Spread the model over devices: auto or balanced.")
    adapter: Path | None = setting(None, "Folder of an adapter saved by peft.")
    static: Literal["auto", "off", "eager", "graph", "compile"] = setting(
        "auto", "Steps of fixed shape, for accelerators: auto (graph on CUDA), graph, compile, off."
    )
    runtime: Literal["auto", "torch", "onnx"] = setting(
        "auto", "What runs forwards on a CPU: onnx (faster), torch, or auto."
    )

    def __post_init__(self) -> None:
        models.check_place(self.device, self.device_map)
        models.check_runtime(self.runtime, self.device, self.dtype, self.static)
        checks.check_budget(self.budget)
        if not (drafters := split(self.drafter)):
            raise InputError(f"got drafter {self.drafter!r}; expected names, or none.")
        checks.check_drafters(drafters)
        if self.adapter is not None:
            models.check_adapter(self.adapter)
        checks.check_model(self.model)
        if self.draft_model is not None:
            check_saved_draft(self.draft_model, self.model)

    def check_needs(self, store: object = None, remedy: str = checks.OTHER, *supplied: str) -> None:
        """Raise InputError if a drafter that is not supplied needs a draft model or a store."""
        drafters = [name for name in split(self.drafter) if name not in supplied]
        checks.check_need("draft model", drafters, self.draft_model, "Give it with --draft-model.")
        checks.check_need("store", drafters, store, remedy)

    def load_engine(self, stores: "StoreOptions | None" = None) -> "Engine":
        """Load the models and open the stores; raise an error for one that does not fit."""
        from ragspec.drafters.build import model_drafter
        from ragspec.engine import engine
        from ragspec.pipelines.methods import compose
        from ragspec.verification.open import load_target

        silence_transformers()
        target, tokenizer = load_target(
            self.model,
            self.device,
            self.dtype,
            device_map=self.device_map,
            adapter=self.adapter,
            static=self.static,
            runtime=self.runtime,
        )
        sources = (stores or StoreOptions()).open(tokenizer, target)
        if self.draft_model is not None:
            draft = model_drafter(self.draft_model, tokenizer, target).model
            sources = replace(sources, draft_model=draft)
        drafter = compose(split(self.drafter), sources, target)
        return engine.Engine(target, tokenizer, drafter, budget=number_or_name(self.budget))


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Stored text to draft from."""

    store: Path | None = option(
        None, "Corpus to draft from, made by `ragspec store build`.", file_okay=False
    )
    history: Path | None = setting(
        None, "Answers of this model, made by `ragspec store from-answers`."
    )
    tenant: str = setting(
        "global", "Tenant whose stored text may be used, in addition to shared text."
    )

    def __post_init__(self) -> None:
        checks.check_store(self.store, "corpus")
        checks.check_store(self.history, "corpus")
        checked_scope(self.tenant)
        if self.tenant != "global" and not self.paths:
            raise InputError(
                f"got tenant={self.tenant} and no store; expected --store or --set history= too."
            )

    @property
    def paths(self) -> dict[str, Path]:
        """The folders that were named, by the name of their option."""
        folders = {"store": self.store, "history": self.history}
        return {name: path for name, path in folders.items() if path is not None}

    def open(self, tokenizer: "Tokenizer | None", target: "CausalTarget") -> "Sources":
        """Open the stores; raise an error for one that does not fit the tokenizer or the model."""
        from ragspec.pipelines.methods import open_sources

        model = target.model if self.paths else None
        folders = self.store, self.history
        return open_sources(*folders, tokenizer=tokenizer, model=model, scope=self.tenant)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling settings, and the most new tokens."""

    temperature: str = option(
        "0",
        "0 always takes the most probable token; model: as its generation config says.",
        "--temperature",
        "-t",
    )
    seed: int | None = option(None, "Random seed. Chosen at random and reported if omitted.")
    max_new_tokens: int | None = option(
        None, "Most new tokens. Default: 160 over documents, else 256 or what fits.", min=1
    )
    top_p: float = setting(1.0, "Keep the tokens that make up this probability.")
    top_k: int = setting(0, "Keep this many tokens; 0 keeps all.")

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> Sampling | None:
        """Return the sampling settings, None for the model's; raise InputError for invalid ones."""
        if self.temperature == OF_MODEL:
            if (self.top_p, self.top_k) != (1.0, 0):
                raise InputError(
                    "Expected --temperature model, got top-p or top-k beside it. Leave them out."
                )
            return None
        try:
            temperature = float(self.temperature)
        except ValueError as error:
            raise InputError(
                f"Expected a number or model as --temperature, got {self.temperature!r}."
            ) from error
        return Sampling(temperature=temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed)

    def settings_for(self, engine: "Engine") -> Sampling:
        """Return the settings of the options, or of the model's generation config."""
        config = engine.target.generation_config
        return self.settings() or Sampling.from_generation_config(config, seed=self.seed, n=1)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options of the output."""

    json: JsonOption = False
    compare: bool = option(
        False, "Also run without speculation and compare time and tokens.", "--compare"
    )
    trace: Path | None = option(
        None, "Write a trace to this file, for `ragspec report`.", dir_okay=False
    )

    def __post_init__(self) -> None:
        checks.check_output(self.trace, checks.TRACE)

    @property
    def streams(self) -> bool:
        """Whether to show text as it is written; not with --compare, as showing takes time."""
        return not (self.json or self.compare)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The documents that are searched."""

    docs: list[Path] = option(
        [],
        "Folder or file of documents, repeatable; or what `ragspec index build` made.",
        "--docs",
        "-d",
        parser=checks.filled_path,
    )
    embedder: str | None = setting(None, EMBEDDER)
    reranker: str | None = setting(None, "Cross-encoder that reorders the first hits of a search.")

    def __post_init__(self) -> None:
        checks.check_paths(*self.docs)
        checks.check_store(self.index, "passages")
        if self.embedder is not None:
            models.check_embedder(self.embedder)
        if self.reranker is not None:
            models.check_reranker(self.reranker)
        if self.index is not None and len(self.docs) > 1:
            raise InputError(
                f"Expected documents, or one index alone, got the index {self.index} among "
                f"{len(self.docs)} paths. `ragspec index add {self.index} PATHS` adds to it."
            )

    @property
    def index(self) -> Path | None:
        """The index among the documents, None if there is none."""
        return next((path for path in self.docs if is_store(path)), None)

    @property
    def settings(self) -> "PromptSettings":
        """The arguments of an `Answerer`."""
        return {}

    def open(self, terminal: Terminal) -> "DocQA":
        """Return the pipeline over the documents."""
        if self.index is None:
            qa = index_documents(self.docs, self.embedder, terminal, **self.settings)
        else:
            with terminal.working("reading the documents"):
                from ragspec.pipelines.answering.docqa import DocQA

                silence_transformers()
                qa = DocQA.from_index(self.index, embedder=self.embedder, **self.settings)
        if self.reranker is not None:
            from ragspec.retrievers.search.reranker import CrossEncoder

            silence_transformers()
            cast(Any, qa.retriever).reranker = CrossEncoder(self.reranker)
        return qa


@dataclass(frozen=True, slots=True)
class DocumentOptions(SearchOptions):
    """The documents that are searched, and the prompt over them."""

    top_passages: int | None = setting(
        None,
        "Passages in the prompt. Default: 3; small chat models: best sentence; ask-iterative: 1.",
        least=1,
    )
    prompt: str | None = setting(None, PROMPT)
    system: str | None = setting(None, SYSTEM)

    def __post_init__(self) -> None:
        SearchOptions.__post_init__(self)
        if self.prompt is not None:
            find_template(self.prompt, self.system)

    @property
    def settings(self) -> "PromptSettings":
        """Those of a prompt too."""
        return {"top_k": self.top_passages, "prompt": self.prompt, "system": self.system}


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Everything that a command needs to write one text."""

    supplied: ClassVar[Collection[str]] = ()  # drafters to which the command gives all they need
    engine: EngineOptions
    stores: StoreOptions
    sampling: SamplingOptions
    output: OutputOptions
    prediction: str | None = setting(
        None, "Text that the output will resemble, to copy from; @FILE reads it."
    )

    def __post_init__(self) -> None:
        self.engine.check_needs(self.stores.paths, checks.GIVE_STORE, *self.supplied)
        if self.stores.paths:
            checks.check_stored(split(self.engine.drafter))

    def read_prediction(self) -> dict[str, str]:
        """Return a prediction as an option of the engine; raise InputError if it cannot be used."""
        text, engine = self.prediction, self.engine
        if text is None:
            return {}
        if split(engine.drafter) == ("none",) and engine.draft_model is None:
            raise InputError(
                f"Expected a drafter beside a prediction, got --drafter {engine.drafter}, which "
                "copies from no text. Leave one out."
            )
        if not text.startswith("@"):
            return {"prediction": checks.checked_text(text)}
        return {"prediction": read_input(Path(text[1:]), "the prediction")}


def index_documents(
    paths: Sequence[Path],
    embedder: str | None,
    terminal: Terminal,
    dense: str = "exact",
    **settings: "Unpack[PromptSettings]",
) -> "DocQA":
    """Read documents, before torch is imported, and index them; note the files left out."""
    with progress(terminal, "reading the documents") as on_progress:
        loaded = load_documents(paths, on_progress=on_progress)

        from ragspec.pipelines.answering.docqa import DocQA
        from ragspec.retrievers.search.dense import DEFAULT_EMBEDDER

        if embedder is not None:  # the bundled one shows no bars, and transformers costs seconds
            silence_transformers()
        embedder = embedder or DEFAULT_EMBEDDER
        qa = DocQA.from_documents(
            loaded, embedder=embedder, dense=dense, on_progress=on_progress, **settings
        )
    for skipped in qa.skipped:
        terminal.note_skipped(skipped.path, skipped.reason)
    return qa


def silence_transformers() -> None:
    """Turn off progress bars and warnings of transformers; errors still show."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def number_or_name(text: str) -> str | int:
    """Return the text as a number if it is one, else unchanged."""
    return int(text) if text.isdecimal() else text
