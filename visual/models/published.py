"""Loads published weights: opens their file without running code, renames them, checks all of them.

The weights are under "model" (DDP), "module" (DeepSpeed), "state_dict", "ema" (a running mean) or
at the top (FSDP), in a torch pickle or in safetensors. Pickles are read with weights_only=True.
A `WeightLayout` describes the files of one kind of model.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from ragspec.errors import InputError, MissingModelError, ModelError
from ragspec.sampling.settings import checked_count

Tensors = dict[str, Tensor]
Model = TypeVar("Model", bound=nn.Module)

PLACES = ("model", "module", "state_dict", "ema")
_PREFIXES = re.compile(r"^(_orig_mod\.|module\.)+")  # of torch.compile and of wrappers
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module)")
_TELLING = {  # weights that tell the kind of a file
    "tok_embeddings.weight": " It is a LlamaGen generator: open it with load_llamagen.",
    "quantize.embedding.weight": " It is a LlamaGen tokenizer: open it with VQTokenizer.",
    "z_proj.weight": " It is a MAR model: open it with load_mar.",
}


def by_patterns(*patterns: tuple[str, str]) -> Callable[[Iterable[str]], dict[str, str]]:
    """Return a function that renames weights by patterns, applied one after the other."""

    def rename(names: Iterable[str]) -> dict[str, str]:
        renamed = {name: name for name in names}
        for pattern, ours in patterns:
            renamed = {name: re.sub(pattern, ours, each) for name, each in renamed.items()}
        return renamed

    return rename


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The published layout of one kind of model.

    Attributes:
        kind: The kind of model, for messages.
        needed: The axes of weights, by our names, that tell the kind and the sizes. The first one
            has the dtype of the model.
        rename: Returns our name of each published one.
        dropped: Matches the published names of weights that are not loaded.
        linear: Matches our names of linear layers that are 1 x 1 convolutions in the file.
        places: Keys to look for the weights under.
        heads: The number of attention heads by the width of published models.
        prepare: Changes weights by published names before all else.
    """

    kind: str
    needed: Mapping[str, int]
    rename: Callable[[Iterable[str]], dict[str, str]]
    dropped: str = "$^"
    linear: str = "$^"
    places: Sequence[str] = PLACES
    heads: Mapping[int, int] = field(default_factory=dict)
    prepare: Callable[[Tensors], Tensors] = dict

    def load(
        self,
        path: str | Path,
        build: Callable[[Tensors, Tensors, object], Model],
        dtype: torch.dtype | None = None,
    ) -> Model:
        """Return the model of a file, in eval mode on the CPU.

        Args:
            build: Makes the model of the weights by our names, all tensors of the file by published
                names, and the training settings or None.
            dtype: None keeps the file's.

        Raises:
            MissingModelError: There is no such file.
            ModelError: It holds other objects, other weights or weights that are not finite.
        """
        tensors, settings = read_checkpoint(path, self.places)
        origin = Path(path).name
        loaded = {name: each for name, each in tensors.items() if not re.search(self.dropped, name)}
        published = self.prepare(loaded)
        names = self.rename(published)
        weights = {ours: published[name] for name, ours in names.items()}
        self._check_kind(weights, names, origin)
        dtype = weights[next(iter(self.needed))].dtype if dtype is None else dtype
        weights = {ours: each.to(dtype) for ours, each in weights.items()}
        if wrong := [name for name, ours in names.items() if not weights[ours].isfinite().all()]:
            raise ModelError(
                f"{origin} holds {', '.join(wrong[:3])} with values that are not finite; expected "
                "finite floats. Copy it again, or load it in a wider dtype."
            )
        for ours, each in weights.items():
            # A kernel other than 1 x 1 becomes too wide, so that it is refused below.
            if re.search(self.linear, ours) and each.ndim == 4:
                weights[ours] = each.flatten(1)
        with torch.device("meta"):
            model = build(weights, tensors, settings)
        self._check_all(model.state_dict(), weights, names, origin)
        model.load_state_dict(weights, assign=True)
        return model.eval()

    def checked_heads(self, heads: int | None, width: int) -> int:
        """Return a number of heads, None for the published one; raise InputError if impossible."""
        if heads is None and width not in self.heads:
            raise InputError(
                f"the model has a width of {width}, which is none of the published ones, and "
                "weights do not tell their heads; expected num_attention_heads as it was trained."
            )
        return checked_count(self.heads[width] if heads is None else heads, "num_attention_heads")

    def _check_kind(self, weights: Tensors, names: Mapping[str, str], origin: str) -> None:
        """Raise ModelError for weights of other models."""
        for name, axes in self.needed.items():
            if name in weights and weights[name].ndim == axes and weights[name].numel():
                continue
            others = (hint for each, hint in _TELLING.items() if each in names)
            hint = next((each for each in others if self.kind not in each), "")
            held = ", ".join(sorted(names)[:3]) or "no tensors"
            raise ModelError(
                f"{origin} is no {self.kind}: it holds {held}, and no {name} of {axes} axes; "
                f"expected all weights of one under {', '.join(self.places)} or at the top.{hint}"
            )

    def _check_all(
        self, expected: Tensors, weights: Tensors, names: Mapping[str, str], origin: str
    ) -> None:
        """Raise ModelError unless the weights are exactly those expected, in name and shape."""
        uses = Counter(names.values())
        faults = {
            "also holds": [name for name, ours in names.items() if ours not in expected],
            "holds twice": [name for name, ours in names.items() if uses[ours] > 1],
            "lacks": [name for name in expected if name not in weights],
            "holds": [
                f"{name} of shape {list(weights[ours].shape)} in place of "
                f"{list(expected[ours].shape)}"
                for name, ours in names.items()
                if ours in expected and weights[ours].shape != expected[ours].shape
            ],
        }
        message = [f"{how} {', '.join(what[:3])}" for how, what in faults.items() if what]
        if message:
            raise ModelError(
                f"the weights of {origin} are not those of one {self.kind}: it "
                f"{'; it '.join(message)}. Expected all of a published one, and nothing else."
            )


def count_blocks(weights: Tensors, blocks: str) -> int:
    """Return the number of blocks whose weights have names such as `blocks`.3.bias."""
    numbers = re.compile(rf"{re.escape(blocks)}\.(\d+)\.")
    return 1 + max((int(each[1]) for each in map(numbers.match, weights) if each), default=-1)


def read_checkpoint(path: str | Path, places: Sequence[str] = PLACES) -> tuple[Tensors, object]:
    """Return the weights of a file by their published names, and its training settings or None.

    Args:
        places: Keys to look for the weights under, in this order, before the top.

    Raises:
        MissingModelError: There is no such file.
        ModelError: It cannot be read or holds other objects.
    """
    file = Path(path)
    if not file.is_file():
        raise MissingModelError(f"got {path}, which is no file; expected a .pt or .safetensors.")
    content = _opened(file)
    if not isinstance(content, Mapping):
        raise ModelError(f"{file.name} holds a {type(content).__name__}; expected named weights.")
    inner = next((content[p] for p in places if isinstance(content.get(p), Mapping)), content)
    tensors = ((str(name), each) for name, each in inner.items() if isinstance(each, Tensor))
    return {_PREFIXES.sub("", name): each for name, each in tensors}, content.get("args")


def _opened(file: Path) -> object:
    """Return the file's content; refuse anything but tensors, plain containers and settings."""
    from safetensors.torch import load_file

    safe = file.suffix == ".safetensors"
    try:  # training scripts write their settings as a Namespace: plain data, no code
        with torch.serialization.safe_globals([argparse.Namespace]):
            return load_file(file) if safe else torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # a refusal, or whatever a damaged file may raise
        if safe:
            raise ModelError(
                f"{file.name} cannot be read as a safetensors file: {error}. Copy it again."
            ) from error
        # Torch's own text advises how to run the file's code, so the message leaves it out.
        if (refused := _REFUSED.search(str(error))) is None:
            reason = str(error) if isinstance(error, OSError) else type(error).__name__
            raise ModelError(
                f"{file.name} cannot be read as a torch file of tensors ({reason}); expected what "
                "torch.save writes, whole. Copy it again, or save its weights as safetensors."
            ) from None
        raise ModelError(
            f"{file.name} holds {refused.group(1)}; expected tensors and plain containers. It will "
            "not be opened: such objects can run code. Save its weights alone."
        ) from None
