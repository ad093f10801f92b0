"""`ragspec train-head`: a draft head that drafts for one model."""

from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ragspec.errors import InputError, UnsupportedModelError, pluralize
from ragspec.models.checks import DTYPES, check_head_files, check_head_vocabulary, read_vocab_size
from ragspec.models.resolve import resolve_model
from ragspec.pipelines.cli.store import at_most, counting
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import option, setting, takes_records
from ragspec.pipelines.console.terminal import Terminal
from ragspec.pipelines.console.texts import TextColumns, read_texts
from ragspec.training.files import check_out, read_codes
from ragspec.visual.loading import find_folder, read_kind

if TYPE_CHECKING:
    from ragspec.training.trainer import HeadTraining, TrainingProgress

Form = Literal["eagle1", "eagle3", "peagle", "dflash", "medusa", "hydra", "hydra++"]


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """The model of a draft head, the texts to learn from, and the training."""

    place: o.PlaceOptions
    data: Path = option(
        ...,
        "Texts to learn from: a folder, documents, jsonl or parquet; for a LlamaGen model "
        "a .npz with codes and labels or features.",
        parser=checks.filled_path,
    )
    out: Path = option(..., "The folder that the head goes to.", "--out", "-o")
    model: o.ModelOption = "starter"
    steps: int = option(2000, "Most steps of the optimizer.", min=1)
    minutes: float | None = option(None, "End the training after so long.")
    max_tokens: int | None = option(None, "Read so many tokens at most.", min=1)
    seed: int = option(0, "Random seed of the first weights, the order and the noise.")
    start: Path | None = option(None, "Begin with this trained head, to learn from other texts.")
    resume: bool = option(False, "Go on with the training that was left in --out.", "--resume")
    replace: bool = option(False, "Put it in the place of the head that is there.", "--replace")
    json: o.JsonOption = False
    form: Form | None = setting(None, f"Form: {', '.join(get_args(Form))}. Default: eagle1.")
    slots: int | None = setting(None, "Tokens of a pass, in forms with slots. Default: 4.", least=1)
    batch: int = setting(8, "Texts of a step.", least=1)
    length: int = setting(256, "Split texts into so many tokens; pictures stay whole.", least=4)
    rate: float | None = setting(None, "Learning rate at its height. Default: by the width.")
    depth: int = setting(1, "Rounds in which the head learns from its own guesses.", least=1)
    vocabulary: int | None = setting(
        None, "Draft only so many tokens, the most frequent. Default: all.", least=1
    )
    field: str | None = setting(None, "Column of the rows; the usual names are tried without it.")

    def __post_init__(self) -> None:
        checks.check_paths(self.data)
        check_out(self.out, resume=self.resume, replace=self.replace)
        if self.start is None and not self.in_slots and (self.slots or 1) > 1:
            raise InputError(
                f"got slots={self.slots} for a head of {self.form or 'eagle1'}; expected one of "
                "peagle, dflash, medusa, hydra and hydra++. Set form, or leave slots out."
            )
        if self.pictures:
            self._check_pictures()
        else:
            checks.check_model(self.model)
            size = read_vocab_size(resolve_model(self.model))
            if self.vocabulary is not None and size is not None:
                check_head_vocabulary(self.vocabulary, size)
        if self.start is not None:
            check_head_files(self.start)
        for number, name in ((self.minutes, "--minutes"), (self.rate, "rate")):
            if number is not None and not 0.0 < number < inf:
                raise InputError(f"{name} is {number:g}; expected a number above 0, or none.")

    def _check_pictures(self) -> None:
        """Raise an error for a model or settings with which no head of pictures is trained."""
        folder = find_folder(self.model).target
        if folder.is_dir() and (kind := read_kind(folder)) != "llamagen":
            raise UnsupportedModelError(
                f"Expected a LlamaGen model, got {self.model}, a {kind!r} model: image heads "
                "are trained for LlamaGen alone. Name another --model."
            )
        if (dtype := self.place.dtype) not in ("auto", *DTYPES):
            raise InputError(f"got dtype={dtype} for pictures; expected float32 or none.")
        for name in ("vocabulary", "max_tokens", "field"):
            if getattr(self, name) is not None:
                raise InputError(f"got {name} for pictures; expected texts. Leave it out.")

    @property
    def in_slots(self) -> bool:
        """Whether the form drafts several tokens in one pass, which guidance does not allow."""
        return not (self.form or "eagle1").startswith("eagle")

    @property
    def pictures(self) -> bool:
        """Whether the head learns from pictures, not from texts."""
        return self.data.suffix == ".npz"

    def training(self) -> "HeadTraining":
        """Return the settings of the training."""
        from ragspec.training.trainer import HeadTraining

        same = ("steps", "length", "depth", "form", "slots", "seed")
        return HeadTraining(
            seconds=None if self.minutes is None else 60.0 * self.minutes,
            batch_size=self.batch,
            learning_rate=self.rate,
            draft_vocab_size=self.vocabulary,
            **{name: getattr(self, name) for name in same},
        )


@takes_records
def train_head(options: HeadOptions) -> None:
    """Train a draft head (EAGLE) that drafts from a model's own hidden states.

    A checkpoint is written every minute. Ctrl-C keeps the best head so far; --resume continues.
    """
    terminal = Terminal(quiet=options.json)
    summary = train_from_files(options, terminal)
    terminal.json(summary)
    terminal.line(
        f"{options.out}: {summary['parameters']:,} weights after "
        f"{pluralize(summary['steps'], 'step')} in "
        f"{summary['seconds']:.0f} s; on {'held-out' if summary['held_out'] else 'training'} texts "
        f"the head's best token is the model's in {summary['agreement']:.0%} of places"
    )


def train_from_files(
    options: HeadOptions, terminal: Terminal, settings: "HeadTraining | None" = None
) -> dict[str, Any]:
    """Load a model and texts or pictures, train a head, and return the figures."""
    pictures = read_codes(options.data) if options.pictures else ()
    data, columns = str(options.data), TextColumns(options.field)
    rows = () if pictures else read_texts([data], columns, terminal.note_skipped)

    from ragspec.models.load import load_model
    from ragspec.retrievers.corpus.catalogue import tokenized
    from ragspec.training.run import train_head
    from ragspec.verification.open import open_target

    o.silence_transformers()
    settings = settings or options.training()
    place = options.place.device, options.place.dtype
    if not pictures:
        with terminal.working("loading the model"):
            loaded, tokenizer = load_model(options.model, *place)
        target = open_target(loaded)
        with counting(terminal, "reading") as on_progress:
            read = at_most(tokenized(rows, tokenizer, on_progress), options.max_tokens)
            texts = [row.tolist() for row in read]
        longest = target.max_length or settings.length
        settings = replace(settings, length=min(settings.length, longest))
    else:
        import torch

        from ragspec.training.batches import seeded
        from ragspec.training.image_texts import code_texts
        from ragspec.visual.families.llamagen import LlamaGen

        if options.in_slots:
            terminal.note(f"a head of {options.form} drafts without guidance: use --guidance 1")
        model = LlamaGen.load_model(find_folder(options.model).target, *place)
        codes, conditions = map(torch.from_numpy, pictures)
        target, texts = code_texts(model, codes, conditions, seeded(settings.seed, 0, 1))
        # A piece of a picture without its condition would teach the head nonsense.
        settings = replace(settings, length=max(settings.length, *map(len, texts)))
    with terminal.working("training") as show:
        return train_head(
            *(target, texts, options.out, settings),
            notify=terminal.note,
            on_step=lambda step: show(_line(step)),
            start=options.start,
            resume=options.resume,
        )


def _line(step: "TrainingProgress") -> str:
    """Return one line about a step, with the estimated minutes to the end."""
    left = step.seconds * (1.0 - step.part) / step.part / 60
    ahead = f", about {left:.0f} min left" if step.step and left >= 1 else ""
    return (
        f"{step.part:.0%}, step {step.step + 1}: loss {step.loss:.3f}, best of its tokens right "
        f"in {step.agreement:.0%} of places, {step.seconds:.0f} s{ahead}"
    )
