"""The tensors and the configuration in a folder of a draft head, before their layout is known."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any, Self
from zipfile import is_zipfile

import torch
from torch import Tensor

from ragspec.drafters.heads.config import HeadConfig, HeadWeights, part_of, size_of
from ragspec.drafters.heads.head import DraftHead
from ragspec.errors import InputError, ModelError, RagspecError, UnsupportedModelError
from ragspec.models.block_linear import block_floats
from ragspec.models.checks import CONFIG, INDEX, PICKLED, check_head_files, read_config
from ragspec.types import PreTrainedConfig

_PARTS = "codes", "scales"  # see `BlockLinear`
_VOCABULARY = "d2t", "t2d"  # see `Checkpoint.head`
_QUANTISED = "weight_scale_inv", "weight_scale", "weight_packed", "qweight", "qzeros"
NAMES = {"layers.": "layers.layers.", "lm_head.": "output.", "embed_tokens.": "embedding."}
"""Prefixes of `DraftHead` by those of most layouts, where they differ."""
TAP_NAMES = NAMES | {"input_norm.": "tap_norms.0.", "fc_norm.": "tap_norms."}
_LAYER_SETTINGS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "rope_parameters", "max_position_embeddings", "attention_bias", "mlp_bias"),
    *("sliding_window", "layer_types"),
)
"""The settings of a head's layers in a configuration of transformers."""


@dataclass(slots=True)
class Checkpoint:
    """A configuration and named tensors, which are read when they are asked for.

    Weights that `save_head` wrote in 8 bits, as `NAME.codes` and `NAME.scales`, count as
    `NAME.weight`.

    Attributes:
        names: The file of each tensor.
    """

    folder: Path
    config: dict[str, Any]
    names: Mapping[str, Path]
    _pickled: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Read the configuration of a folder and the names of its tensors.

        Raises:
            MissingModelError: The folder has no head.
        """
        folder = Path(folder)
        weights = check_head_files(folder)
        config = read_config(folder / CONFIG)
        if weights.name in PICKLED:
            tensors = load_pickle(weights, mmap=is_zipfile(weights))
            named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
            if not named or not all(map(torch.is_tensor, tensors.values())):
                raise ValueError(f"{weights.name} holds other values than tensors by their names")
            return cls(folder, config, dict.fromkeys(tensors, weights), tensors)
        if weights.name == INDEX:
            files = part_of(read_config(weights, "weight_map"), "weight_map", dict)
            for name, file in files.items():
                if Path(str(file)).name != file or not (folder / file).is_file():
                    raise ValueError(f"{INDEX} names {file!r} for {name}, no file beside it")
            return cls(folder, config, {name: folder / file for name, file in files.items()})
        from safetensors import safe_open

        with safe_open(weights, "pt") as file:
            stored = {*file.keys()}
            return cls(folder, config, {_whole(name, stored): weights for name in stored})

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors by their names, floating-point ones in float32.

        Raises:
            UnsupportedModelError: Weights are quantised.
            ValueError: Weights are not finite, or of a type that weights do not have.
        """
        from safetensors import safe_open

        names = list(names)
        tensors = {name: self._pickled[name] for name in names if name in self._pickled}
        for path in {self.names[name] for name in names if name not in tensors}:
            with safe_open(path, "pt") as file:
                stored = {*file.keys()}
                for name in (each for each in names if self.names[each] == path):
                    parts = [name.removesuffix("weight") + each for each in _PARTS]
                    if name in stored:
                        tensors[name] = file.get_tensor(name)
                    elif stored.issuperset(parts):
                        codes, scales = map(file.get_tensor, parts)
                        tensors[name] = block_floats(codes, scales.float())
                    else:
                        raise ValueError(f"{path.name} has no tensor {name}")
        small = [
            name
            for name, each in tensors.items()
            if name.endswith(_QUANTISED) or (each.element_size() < 2 and name not in _VOCABULARY)
        ]
        if small:
            raise UnsupportedModelError(
                f"{self.folder} has quantised weights ({', '.join(sorted(small)[:3])}); expected "
                "a head in float32, float16 or bfloat16. Use the head that was quantised."
            )
        for name, each in tensors.items():
            ids = name in _VOCABULARY
            fits = not each.is_complex() and each.is_floating_point() != ids
            if not fits or not each.float().isfinite().all():
                kind = "whole" if ids else "finite floating-point"
                raise ValueError(f"{name} of {each.dtype} has other values than {kind} numbers")
        return {n: each if n in _VOCABULARY else each.float() for n, each in tensors.items()}

    def state(self, table: Mapping[str, str], names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors by the names of `DraftHead`.

        Args:
            table: Prefixes of `DraftHead` by those of the file.
        """
        return {rename(name, table): each for name, each in self.tensors(names).items()}

    def head(self, state: dict[str, Tensor], **settings: Any) -> HeadWeights:
        """Return a head with these tensors.

        The offsets `d2t` of drafted tokens become their ids, `tokens`, which imply the mask `t2d`.

        Args:
            settings: Those of its `HeadConfig`, as far as the tensors do not tell them. The sizes
                of embeddings and states are the head's own by default.
        """
        width = size_of(settings["layers"], "hidden_size")
        offsets, mask = state.pop("d2t", None), state.pop("t2d", None)
        if offsets is not None and (offsets.ndim != 1 or not len(offsets)):
            raise ValueError(f"d2t has shape {list(offsets.shape)}, no list of offsets")
        tokens = None if offsets is None else offsets.long() + torch.arange(len(offsets))
        facts: dict[str, Any] = {
            "embedding_size": width,
            "target_size": width,
            "bias": "fc.bias" in state,
            "draft_vocab_size": None if tokens is None else len(tokens),
            "has_output": "output.weight" in state,
            "has_embedding": "embedding.weight" in state,
            "target": part_of(self.config, "ragspec", dict).get("target", ""),
        }
        config = HeadConfig(**facts | settings)
        if tokens is None:
            rows = state.get("output.weight")
            if rows is not None and len(rows) != config.vocab_size:
                raise ValueError(f"{len(rows)} rows of logits, {config.vocab_size} tokens, no d2t")
            return HeadWeights(config, state)
        ordered = bool((tokens[1:] > tokens[:-1]).all())
        if not ordered or tokens[0] < 0 or tokens[-1] >= config.vocab_size:
            raise ValueError("its tokens are no increasing ids of the vocabulary")
        if mask is not None and mask.any() and not torch.equal(mask.nonzero()[:, 0], tokens):
            raise ValueError("t2d marks other tokens than d2t")
        return HeadWeights(config, state | {"tokens": tokens})


@contextmanager
def refuse_damage(folder: Path | str) -> Iterator[None]:
    """Raise ModelError if the files of a folder turn out to be damaged."""
    try:
        yield
    except Exception as error:  # transformers, safetensors and pickle have errors of their own
        passes = RagspecError, MemoryError, ImportError
        if isinstance(error, passes) and not isinstance(error, InputError):
            raise
        reason = f"it lacks {error}" if isinstance(error, KeyError) else shorten(str(error), 400)
        raise ModelError(
            f"{folder} holds no draft head that can be read ({reason}); fetch or train it again."
        ) from error


def load_pickle(path: Path, *, mmap: bool = False) -> Any:
    """Return the tensors and plain values in a pickle; raise ValueError for other objects."""
    try:
        return torch.load(path, "cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch advises to load a file that could run code
        if isinstance(error, OSError | MemoryError):
            raise
        raise ValueError(f"{path.name} is damaged, or holds objects that could run code") from None


def _whole(name: str, stored: set[str]) -> str:
    """Return the name of the weight that a stored tensor is a part of."""
    stem, _, part = name.rpartition(".")
    both = part in _PARTS and stored.issuperset(f"{stem}.{each}" for each in _PARTS)
    return f"{stem}.weight" if both else name


def rename(name: str, table: Mapping[str, str]) -> str:
    """Return a name with its longest prefix in a table replaced; a name without one is the same."""
    prefix = max((each for each in table if name.startswith(each)), key=len, default=None)
    return name if prefix is None else table[prefix] + name.removeprefix(prefix)


def select_layers(settings: Mapping[str, object]) -> dict[str, object]:
    """Return what the configuration of a model or a head says of its layers."""
    return {name: settings[name] for name in _LAYER_SETTINGS if settings.get(name) is not None}


def copied_layer(text: PreTrainedConfig) -> dict[str, object]:
    """Return the configuration of one layer like those of a model's configuration."""
    layers = select_layers(text.to_dict())
    layers.pop("layer_types", None)
    return {"model_type": text.model_type, **layers, "num_hidden_layers": 1}


def to_file(head: DraftHead, table: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of a head by the names of a file, those of its tokens as `d2t` and `t2d`.

    Args:
        table: Prefixes of `DraftHead` by those of the file; none occurs twice.
    """
    state = head.state_dict()
    tokens = state.pop("tokens", None)
    theirs = {ours: name for name, ours in table.items()}
    tensors = {rename(name, theirs): each for name, each in state.items()}
    if tokens is not None:
        tokens = tokens.cpu()
        mask = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        mask[tokens] = True
        tensors |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": mask}
    return tensors
