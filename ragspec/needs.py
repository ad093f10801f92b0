"""The needs of drafters, rules and transforms, matched with the capabilities of a target.

Each part declares its `Needs`, and a part that contains others declares their union. A target, or a
host program that only asks for drafts, declares its `Capabilities`. `match` compares the two before
a text begins and raises the error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import TYPE_CHECKING

from ragspec.errors import RagspecError, RuleError, UnsupportedModelError
from ragspec.trees.draft_tree import DraftKind

if TYPE_CHECKING:
    from torch import Tensor

LAST = -1  # in place of a layer's number: the last states, which the output head reads


@dataclass(frozen=True, slots=True, eq=False)
class HiddenStates:
    """Hidden states of a target at n positions.

    Attributes:
        by_tap: States [copies, n, H] by their number, see `Needs.hidden_states`. `copies` is 2 with
            guidance, the conditional one first.
    """

    by_tap: "Mapping[int, Tensor]"

    def __len__(self) -> int:
        """Return the number of positions."""
        return next(iter(self.by_tap.values())).shape[1]

    def at(self, positions: "slice | Tensor | Sequence[int]") -> "HiddenStates":
        """Return the states of some positions."""
        return HiddenStates({tap: states[:, positions] for tap, states in self.by_tap.items()})

    def of(self, taps: Iterable[int]) -> "Tensor":
        """Return the states with these numbers side by side, [copies, n, H times numbers]."""
        parts = [self.by_tap[tap] for tap in taps]
        return parts[0] if len(parts) == 1 else _joined(parts, -1)

    @classmethod
    def joined(cls, parts: "Sequence[HiddenStates]") -> "HiddenStates":
        """Return the states of successive forwards as those of one."""
        taps = set(parts[0].by_tap).intersection(*(part.by_tap for part in parts))
        return cls({tap: _joined([part.by_tap[tap] for part in parts], 1) for tap in taps})


def _joined(parts: "Sequence[Tensor]", dimension: int) -> "Tensor":
    import torch

    return torch.cat(list(parts), dimension)


@dataclass(frozen=True, slots=True)
class Needs:
    """The data that a part uses beside the tokens of the text.

    Attributes:
        top_tokens: Number of the target's best tokens after each position, as in `Step.best`.
        prompt_top_tokens: Whether it also learns from those of the prompt, if the target computes
            them. They cost prefill time.
        hidden_states: The target's hidden states that it reads, as in `Step.hidden`: numbers i of
            transformers' `hidden_states[i]`, the input of layer i, or LAST.
        draft_prompt: Whether it reads `DraftRequest.draft_prompt`.
        texts: Whether it drafts from `DraftRequest.texts`. For a prediction, `ContextDrafter` is
            added to drafters that do not.
        latents: Whether it judges continuous latents.
        probabilities: Whether it reads the target's distributions over all tokens.
        ahead: Whether it reads them after nodes that it may reject, see `Sequence.begin`.
    """

    top_tokens: int = 0
    prompt_top_tokens: bool = False
    hidden_states: tuple[int, ...] = ()
    draft_prompt: bool = False
    texts: bool = False
    latents: bool = False
    probabilities: bool = False
    ahead: bool = False

    @classmethod
    def union(cls, parts: "Sequence[Needs]") -> "Needs":
        """Return the needs of a part that contains others: the largest of each field."""
        most = cls(*map(max, zip(*map(astuple, [cls(), *parts]), strict=True)))
        taps = {tap for part in parts for tap in part.hidden_states}
        return replace(most, hidden_states=tuple(sorted(taps)))


_MODEL = "Use a model that verifies trees of drafts, or leave the part out."
_LATENTS = "Use a rule over latents, such as 'near' or 'horizon'."
# The needs that a target may not meet: what is missing, the class of the error, and the remedy.
_LACKS: Mapping[str, tuple[str, type[RagspecError], str]] = {
    "top_tokens": ("the target's best tokens", UnsupportedModelError, _MODEL),
    "hidden_states": ("the target's hidden states", UnsupportedModelError, _MODEL),
    "latents": ("a model of continuous latents", RuleError, "Use 'walk'."),
    "probabilities": ("tables of probabilities", RuleError, _LATENTS),
}
_JUDGED = (
    "Use rule='walk', which judges every draft, or a drafter of one of those kinds, such as a "
    "ModelDrafter with mode= one of them."
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The data that a target offers, and the drafts that are judged there.

    Attributes:
        owner: The target in error messages.
        kinds, judge: The kinds of draft that the rule judges, and the rule in error messages.
        error, remedy: Class and last sentence of every error; None for those of the missing data.
    """

    top_tokens: bool = True
    hidden_states: bool = True
    latents: bool = False
    probabilities: bool = True
    owner: str = "a model of tokens"
    kinds: frozenset[DraftKind] = frozenset(DraftKind)
    judge: str = "rule 'walk'"
    error: type[RagspecError] | None = None
    remedy: str | None = None

    def lacking(self, needs: Needs) -> list[str]:
        """Return the names of the needs that are not met."""
        needed, offered = asdict(needs), asdict(self)
        return [name for name in _LACKS if needed[name] and not offered[name]]


def match(part: str, needs: Needs, offered: Capabilities, kind: DraftKind | None = None) -> None:
    """Raise an error unless a target meets the needs of a part.

    Args:
        part: The part in error messages, such as "drafter 'head'".
        kind: The kind of its drafts, for a drafter.

    Raises:
        UnsupportedModelError: The model lacks something.
        RuleError: The rule does not judge such drafts, or not those of this model.
        RagspecError: `Capabilities.error`, if that is set.
    """
    for name in offered.lacking(needs):
        data, error, remedy = _LACKS[name]
        raise (offered.error or error)(
            f"{part} needs {data}; got {offered.owner}. {offered.remedy or remedy}"
        )
    if kind is not None and kind not in offered.kinds:
        accepted = ", ".join(sorted(offered.kinds))
        raise (offered.error or RuleError)(
            f"{offered.judge} cannot judge {kind.value!r} drafts ({part}): it accepts {accepted}. "
            f"{offered.remedy or _JUDGED}"
        )
