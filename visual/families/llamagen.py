"""LlamaGen (Sun et al., arXiv 2406.06525): codes by class, or by the features of a text encoder."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ragspec import errors
from ragspec.models.device import AnyDevice, AnyDtype, pick_device, pick_dtype
from ragspec.models.resolve import resolve_model
from ragspec.types import PreTrainedModel
from ragspec.visual.call import ImageCall, ImageConfig, checked_texts, negatives_of, some
from ragspec.visual.checks import check_finite
from ragspec.visual.families.base import Family
from ragspec.visual.loading import ImageFolder, class_labels
from ragspec.visual.models.autoencoder import Autoencoder, KLAutoencoder
from ragspec.visual.models.captions import EMBEDDER, CaptionEncoder, Captions, TextEncoder
from ragspec.visual.models.llamagen import LlamaGenModel
from ragspec.visual.models.llamagen_checkpoint import load_llamagen
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.target import ConditionTable, ImageTarget
from ragspec.visual.models.vq import VQTokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """The conditions of one call's images.

    Attributes:
        condition: Class labels i64 [R], or features [R, L, d].
        padding: How many features at the start of each row are masked.
        negative: Features [R, L, d] that guidance leads away from; None for the embedding that the
            model learned for no condition.
        negative_padding: As `padding`, for each row of `negative`.
        learned bool [R]: Rows of `negative` in whose place that embedding stands.
    """

    condition: Tensor
    padding: tuple[int, ...] = ()
    negative: Tensor | None = None
    negative_padding: tuple[int, ...] = ()
    learned: Tensor | None = None

    def __len__(self) -> int:
        return len(self.condition)

    def table(self, model: LlamaGenModel) -> ConditionTable:
        """Return a model's embeddings of the conditions; raise InputError if they do not fit it."""
        with torch.no_grad():
            embedded = model.condition(self.condition)
            nothing = model.unconditional(1)[0]
            if self.negative is None:
                return ConditionTable(embedded, nothing, self.padding, self.padding)
            beside = model.condition(self.negative)
            if self.learned is not None:
                beside[self.learned] = nothing.to(beside)
        return ConditionTable(embedded, beside, self.padding, self.negative_padding)


class CodecFamily(Family):
    """The base of families whose models and tokenizers may each be a published file.

    Attributes:
        sizes: What the file of a model may not tell, as keywords of `from_pretrained`.
        published: The file of a tokenizer, for messages.
        codecs: The classes of tokenizers.
        shared_size: The size that a tokenizer and the configuration of its model have in common.
        load_published: Returns the model of a file, given its dtype and `sizes`.
    """

    sizes: ClassVar[tuple[str, ...]]
    published: ClassVar[str]
    codecs: ClassVar[tuple[type[Autoencoder], ...]] = (VQTokenizer,)
    shared_size: ClassVar[tuple[str, str]] = ("vocab_size", "vocab_size")
    load_published: ClassVar[Callable[..., Any]]

    def __init__(
        self, model: PreTrainedModel, tokenizer: Autoencoder, folder: ImageFolder | None = None
    ) -> None:
        super().__init__(model, tokenizer, folder)
        if not isinstance(tokenizer, self.codecs):
            expected = " or a ".join(codec.__name__ for codec in self.codecs)
            raise errors.UnsupportedModelError(
                f"got a {type(tokenizer).__name__} as tokenizer; expected a {expected}. Wrap a "
                "diffusers model in one."
            )
        self.codec = tokenizer
        of_codec, of_model = self.shared_size
        size, expected_size = getattr(tokenizer, of_codec), getattr(model.config, of_model)
        if size != expected_size:
            raise errors.TokenizerMismatchError(
                f"got a tokenizer of {of_codec} {size} for a model of {of_model} {expected_size}; "
                "expected the one that the model was trained with. Pass it as tokenizer."
            )
        side = int(self.trunk.config.grid_size)
        self.raster = Raster(side, side)
        self.condition = "class_labels" if self.trunk.config.condition == "class" else "prompt"
        self.class_names = class_labels(self.trunk.config.to_dict()) or ()

    @classmethod
    def load(
        cls, folder: ImageFolder, device: torch.device, dtype: AnyDtype, options: dict[str, object]
    ) -> tuple[PreTrainedModel, object]:
        """Return the model and the tokenizer of a folder or a published file.

        Args:
            options: tokenizer (an object, a folder, or a published file; required with a file), and
                of files `sizes`.
        """
        sizes = {name: options.pop(name, None) for name in cls.sizes}
        tokenizer = options.pop("tokenizer", None) or cls.load_tokenizer(folder)
        model = cls.load_model(folder.target, device, dtype, **sizes)
        if isinstance(tokenizer, str | Path):
            tokenizer = cls.open_tokenizer(Path(tokenizer))
        if isinstance(tokenizer, Autoencoder):
            tokenizer.model.to(device)
        return model, tokenizer

    @classmethod
    def load_tokenizer(cls, folder: ImageFolder) -> Path:
        """Return where the tokenizer of a folder is."""
        if folder.target.is_file():
            raise errors.InputError(
                f"got the checkpoint {folder.target.name} without a tokenizer; expected "
                f"tokenizer=PATH, the {cls.published} that was published beside it."
            )
        if folder.tokenizer is None:
            raise errors.MissingModelError(
                f"no tokenizer was found for {folder.name}: expected tokenizer/ or vae/ in "
                f"{folder.target.parent}, or give tokenizer=PATH."
            )
        return folder.tokenizer

    def save(self, root: Path, **options: object) -> None:
        """Write target/, and vae/ or tokenizer/."""
        self.model.save_pretrained(root / "target", **options)
        part = "vae" if isinstance(self.codec, KLAutoencoder) else "tokenizer"
        self.codec.save_pretrained(root / part, dtype=torch.float32)

    @classmethod
    def load_model(
        cls, folder: Path, device: AnyDevice = "auto", dtype: AnyDtype = "auto", **sizes: object
    ) -> PreTrainedModel:
        """Return the model of a folder or of a published file, on the device; see `Family`.

        Args:
            dtype: "auto" keeps that of a file on an accelerator.
            sizes: Those that a file may not tell.
        """
        if not folder.is_file():
            return super().load_model(folder, device, dtype)
        place = pick_device(device)
        kind = pick_dtype(dtype, place)
        of_file = None if isinstance(kind, str) else kind
        return cls.load_published(folder, dtype=of_file, **sizes).to(place)

    @classmethod
    def open_tokenizer(cls, path: Path) -> Autoencoder:
        """Return the tokenizer of a folder, or of a file such as vq_ds16_c2i.pt."""
        return VQTokenizer.from_pretrained(path)


class LlamaGen(CodecFamily):
    """A `LlamaGenModel` with the `VQTokenizer` of its codes.

    Class-conditional models take class_labels, the others prompts.

    Args:
        text_encoder: For models of prompts: a folder or model id for transformers (LlamaGen's is
            google/flan-t5-xl), or a function of texts; None takes the bundled embedder if it fits.
    """

    kind = "llamagen"
    model_class, load_published = LlamaGenModel, staticmethod(load_llamagen)
    options = frozenset({"text_encoder"})
    sizes = ("grid_size", "num_attention_heads")
    published = "vq_ds16_c2i.pt or vq_ds16_t2i.pt"

    def __init__(
        self,
        model: LlamaGenModel,
        tokenizer: VQTokenizer,
        folder: ImageFolder | None = None,
        *,
        text_encoder: str | Path | Captions | None = None,
    ) -> None:
        super().__init__(model, tokenizer, folder)
        self.text_encoder = caption_encoder(self.trunk, text_encoder)
        self._encoder = text_encoder

    def save(self, root: Path, **options: object) -> None:
        """Write the model and the tokenizer; an encoder is saved by its name."""
        super().save(root, **options)
        if not isinstance(self._encoder, str | Path | None):
            warnings.warn(
                "a text_encoder that is no name is not saved; give it to from_pretrained again.",
                stacklevel=4,
            )

    @property
    def record(self) -> dict[str, object]:
        """The further arguments of the constructor to save."""
        name = self._encoder
        return {"text_encoder": str(name)} if isinstance(name, str | Path) else {}

    @property
    def components(self) -> dict[str, object]:
        """The parts that other pipelines may share."""
        return super().components | {"text_encoder": self._encoder}

    def conditions(self, call: ImageCall, raster: Raster) -> Conditions:
        """Return the labels, or the features of prompts and negative prompts."""
        if self.condition == "class_labels":
            labels = [self.label_of(each) for each in some(call.class_labels)]
            return Conditions(torch.tensor(labels))
        texts = checked_texts(some(call.prompt))
        features, padding = self._features(texts)
        if call.negative_prompt is None:
            return Conditions(features, padding)
        negatives = negatives_of(call.negative_prompt, len(texts))
        learned = torch.tensor([not text.strip() for text in negatives])
        pairs = zip(negatives, texts, strict=True)
        beside, other = self._features([text if text.strip() else prompt for text, prompt in pairs])
        return Conditions(features, padding, beside, other, learned)

    def open(
        self, model: LlamaGenModel, conditions: Conditions, config: ImageConfig
    ) -> ImageTarget:
        """Return an `ImageTarget`."""
        table, guidance = conditions.table(model), (config.guidance_scale, config.guidance_interval)
        return ImageTarget(model, table, *guidance, fixed=config.fixed, raster=config.raster)

    def load_draft(self, path: Path) -> PreTrainedModel:
        """Return the draft model of a folder or a published file."""
        place, side = self.model.device, self.raster.height
        return self.load_model(path, place, self.model.dtype, grid_size=side)

    def shared(self, model: LlamaGenModel) -> dict[str, object]:
        """Return the sizes of codes, image and conditions."""
        conditions = "num_classes" if model.config.condition == "class" else "caption_dim"
        names = ("vocab_size", "grid_size", "condition", "condition_length", conditions)
        return {name: getattr(model.config, name) for name in names}

    def _features(self, texts: list[str]) -> tuple[Tensor, tuple[int, ...]]:
        """Return features [R, L, d] of texts, and the number of padding rows before each."""
        if self.text_encoder is None:
            raise errors.InputError(
                "got a prompt, but this model reads the features of a text encoder that is not "
                "bundled; expected text_encoder=NAME_OR_FOLDER for the pipeline, or a function "
                "that returns features [n, d] of each text."
            )
        length = int(self.trunk.config.condition_length)
        return padded_features(self.text_encoder(texts), length, len(texts))


def caption_encoder(
    model: LlamaGenModel, inputs: str | Path | Captions | None = None
) -> Captions | None:
    """Return the text encoder of a model; None for class labels, or if the bundled one misfits.

    Args:
        inputs: A folder or model id of a transformers text encoder, or a function of texts; None
            for the bundled encoder.

    Raises:
        InputError: The model is conditioned on classes, or on features of another width.
        MissingModelError, ModelError: The encoder is missing or does not load.
    """
    config, length = model.config, int(model.config.condition_length)
    if config.condition == "class":
        if inputs is None:
            return None
        raise errors.InputError(
            "got a text_encoder for a model of classes; expected none. Draw with class_labels."
        )
    if inputs is None:
        folder = resolve_model(EMBEDDER, offline=True).folder
        encoder = CaptionEncoder.from_pretrained(folder, length)
        return encoder if encoder.width == config.caption_dim else None
    if isinstance(inputs, str | Path):
        inputs = TextEncoder.from_pretrained(inputs, length, model.device, model.dtype)
    width = getattr(inputs, "width", config.caption_dim)
    if not callable(inputs) or width != config.caption_dim:
        got = f"one of {width} numbers a token" if callable(inputs) else repr(inputs)
        raise errors.InputError(
            f"got text_encoder {got}; expected a name, a folder or a function of texts with "
            f"{config.caption_dim} numbers a token, what the image model was trained with."
        )
    return inputs


def padded_features(
    features: Tensor | Sequence[Tensor], length: int, count: int
) -> tuple[Tensor, tuple[int, ...]]:
    """Pad the features of prompts on the left to [R, L, d], as LlamaGen does.

    Args:
        features: One [n, d] for each prompt, n from 1 to L.
        length, count: L and R.

    Returns:
        The padded features, and the padding of each prompt, empty if no prompt has any.
    """
    prompts = list(features) if isinstance(features, Tensor | Sequence) else [features]
    fits = all(isinstance(each, Tensor) and each.ndim == 2 for each in prompts)
    if not fits or len(prompts) != count:
        shapes = [list(getattr(each, "shape", [])) or repr(each) for each in prompts[:8]]
        raise errors.InputError(
            f"got features of shape {shapes} of the text encoder for "
            f"{errors.pluralize(count, 'text')}; expected [n, d] of each text."
        )
    sizes, widths = [len(prompt) for prompt in prompts], {prompt.shape[1] for prompt in prompts}
    if min(sizes) < 1 or max(sizes) > length or len(widths) > 1:
        raise errors.InputError(
            f"got prompts of {', '.join(map(str, sizes[:8]))} features of {sorted(widths)} "
            f"numbers; expected 1 to {length} of each, of one width. Cut longer ones."
        )
    padding = tuple(length - size for size in sizes)
    pairs = zip(prompts, padding, strict=True)
    padded = torch.stack([pad(prompt, (0, 0, rows, 0)) for prompt, rows in pairs])
    check_finite(padded, "the text encoder returned features")
    return padded, padding if any(padding) else ()
