"""The configuration of a draft head: what it reads, how it joins it, and what it feeds itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor

from ragspec.errors import InputError
from ragspec.needs import LAST

T = TypeVar("T")
TapNorm = Literal["none", "all", "each"]
JOINS = MappingProxyType(
    {
        **dict.fromkeys(("eagle1", "mtp"), "project"),
        **dict.fromkeys(("eagle3", "peagle"), "attend"),
        **dict.fromkeys(("dflash", "dspark"), "inject"),
        **dict.fromkeys(("hydra", "hydra++"), "path"),
        "medusa": "state",
    }
)
"""How heads of each form join what they read, see `HeadConfig.join`."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The sizes of a head, its form, and the choices that its form leaves open.

    "eagle1" is also EAGLE-2 and HASS: the embedding of a token and the target's last state before
    it are projected to one vector, which a layer without a first norm turns into the state after
    the token. "mtp" are the layers of DeepSeek-V3, Qwen3-Next and MiMo, with norms before and
    after. "eagle3" reads three taps, with a norm, rows and tokens of its own; EAGLE-3.1 adds
    `feeds_norm`. The others draft several tokens in one pass, one in each of their `slots`:
    "peagle" is an EAGLE-3 that also reads mask tokens.

    Attributes:
        layers: transformers' configuration of the head's layers, with its `model_type`.
        embedding_size, target_size, vocab_size: E, H and V of the target.
        form: One of `JOINS`.
        taps: The target's states that it reads, see `Needs.hidden_states`.
        tap_norm: Norms of the taps before they are projected to one state ("attend"): none, one
            over all, or one for each.
        bias: Whether the projection has a bias.
        state_first: Whether the projection reads the state before the token.
        residual_norm: Whether the state is normed before it is added to ("attend").
        feeds_norm: Whether the head reads its normed output as the next state.
        draft_vocab_size: Number of tokens that it may draft; None for all.
        has_output, has_embedding: Whether it has rows of logits, and embeddings, of its own.
        slots: Number of tokens that one pass drafts; 1 if it is `recurrent`.
        mask_token: What slots without a token read ("peagle", "inject").
        from_anchor: Whether the slot of the last token drafts too ("inject").
        causal_windows: Whether layers with a window see only earlier slots ("inject").
        markov_rank: Width of a table by which the token before a slot changes its logits
            ("inject"); 0 for none.
        blocks: Number of residual blocks of a slot ("state", "path").
        target: Fingerprint of the target, see `target_print`; "" if the file names none.

    Raises:
        InputError: Sizes are no whole numbers of at least 1, or do not match.
    """

    layers: dict[str, Any]
    embedding_size: int
    target_size: int
    vocab_size: int
    form: str = "eagle1"
    taps: tuple[int, ...] = (LAST,)
    tap_norm: TapNorm = "none"
    bias: bool = True
    state_first: bool = False
    residual_norm: bool = False
    feeds_norm: bool = False
    draft_vocab_size: int | None = None
    has_output: bool = False
    has_embedding: bool = False
    slots: int = 1
    mask_token: int | None = None
    from_anchor: bool = False
    causal_windows: bool = False
    markov_rank: int = 0
    blocks: int = 1
    target: str = ""

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise InputError(f"got {fault}.")

    def _faults(self) -> Iterator[str]:
        if self.form not in JOINS:
            yield f"form={self.form!r}; expected one of {', '.join(JOINS)}"
        attends = self.prefix or self.join not in ("state", "path")
        names = ["hidden_size"]
        if attends:
            names += ["intermediate_size", "num_attention_heads", "num_hidden_layers"]
        optional = "head_dim", "num_key_value_heads"
        names += [name for name in optional if self.layers.get(name) is not None]
        sizes = {name: self.layers.get(name) for name in names}
        sizes |= {"embedding_size": self.embedding_size, "target_size": self.target_size}
        sizes |= {"vocab_size": self.vocab_size, "draft_vocab_size": self.draft_vocab_size or 1}
        sizes |= {"slots": self.slots, "blocks": self.blocks}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                yield f"{name}={size!r} for a head; expected a whole number of at least 1"
        width, heads = self.hidden_size, int(self.layers.get("num_attention_heads", 1))
        if attends and not self.layers.get("head_dim") and width % (2 * heads):  # for rotary
            yield f"{heads} heads for a width of {width}; expected one whose double divides it"
        if not isinstance(self.target, str):
            yield f"the target {self.target!r}; expected its fingerprint as text"
        if not isinstance(self.mask_token, int) and self.masks:
            yield f"the mask token {self.mask_token!r} for {self.slots} slots; expected its id"
        projects, taps = self.join in ("project", "state", "path"), len(self.taps)
        if projects and (taps != 1 or self.target_size != width):
            yield (
                f"{taps} taps of {self.target_size} for a head that reads one state of {width}; "
                "expected one tap of that width"
            )
        if not projects and self.embedding_size != width and not self.has_embedding:
            yield (
                f"embeddings of {self.embedding_size} for a head of width {width}; expected the "
                "same, or embeddings of its own"
            )

    @property
    def join(self) -> str:
        """How it joins what it reads.

        "project" reads a projection of token and state; "attend" adds what the first layer attends
        to, by token and state side by side, to the state; "inject" reads mask tokens, whose layers
        attend to keys and values of the states; "state" reads the last state in every slot, and
        "path" also the embeddings of the drafted tokens before it.
        """
        return JOINS[self.form]

    @property
    def prefix(self) -> bool:
        """Whether a layer reads the states first."""
        return self.form == "hydra++"

    @property
    def recurrent(self) -> bool:
        """Whether it reads its own output as the next state; else a pass fills `slots`."""
        return self.form in ("eagle1", "mtp", "eagle3")

    @property
    def masks(self) -> int:
        """The number of mask tokens that a pass reads."""
        if self.join == "inject":
            return self.slots - self.from_anchor
        return self.slots - 1 if self.join == "attend" else 0

    @property
    def hidden_size(self) -> int:
        """The width of the head's states."""
        return int(self.layers["hidden_size"])


class HeadWeights(NamedTuple):
    """A head as a file has it.

    Attributes:
        state: Its tensors, by the names of `DraftHead`.
    """

    config: HeadConfig
    state: dict[str, Tensor]


def size_of(settings: Mapping[str, object], name: str) -> int:
    """Return a size of a configuration; raise ValueError where that is no whole number."""
    size = settings.get(name)
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError(f"its {name} is {size!r}, no whole number")
    return size


def part_of(settings: Mapping[str, object], name: str, kind: type[T]) -> T:
    """Return a part of a configuration, an empty one for none; refuse one of another type."""
    part = settings.get(name) or kind()
    if not isinstance(part, kind):
        raise ValueError(f"its {name} is {part}, no {'list' if kind is list else 'object'}")
    return part


def taps_at(settings: Mapping[str, object], name: str, after: int = 0) -> tuple[int, ...]:
    """Return the taps in a list of layers in a configuration; none without the list.

    Args:
        after: 1 if the taps are the outputs of these layers, 0 if they are the inputs.
    """
    ids = part_of(settings, name, list)
    if any(type(each) is not int or each < -after for each in ids):
        raise ValueError(f"its {name} are {ids}, no whole numbers of at least {-after}")
    return tuple(each + after for each in ids)


def norms_of(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the norms of a head of EAGLE-3, by the settings of `HeadConfig`."""
    each = "each" if settings.get("fc_norm") else "none"
    taps = "all" if settings.get("norm_before_fc") else each
    before, output = settings.get("norm_before_residual"), settings.get("norm_output")
    return {"tap_norm": taps, "residual_norm": bool(before), "feeds_norm": bool(output)}
