"""RAPID: a draft model that reads retrieved chunks instead of the whole document.

RAPID (Chen et al. 2025, arXiv 2502.20330, section 3.1): with a long context the target pays for all
of it at every token. A drafter that reads a few retrieved chunks pays for those alone, so it may be
as large as the target, or be the target. It reads `draft_prompt` in place of the prompt, then the
generated tokens. Noise depends on the index of the generated token, so its drafts stay coupled to
the target's choices.

Deviations: drafts are judged by the target's own distribution unless `eta` is above 0, so the text
is that of plain decoding. The paper moves the distribution towards the drafter's (eta above 0),
which gives another text. `Steering` does that exactly, with the term of equation 6; the published
acceptance rule is approximate. The published code ends a draft after a token of probability below
0.1. Here a draft ends where its next forward does not pay; with `ModelDrafter(model, width=1,
min_expected_gain=0.1)` it ends where the path is expected to be accepted with a probability below
0.1. The drafter reads its prompt at the first draft, and drafts nothing once its context is full.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, NodeChances
from ragspec.drafters.fuse import Combined, match_drafter
from ragspec.drafters.method import Method
from ragspec.drafters.model.cache import DraftCache
from ragspec.drafters.model.drafter import ModelDrafter, draft_target
from ragspec.errors import InputError
from ragspec.needs import Capabilities, Needs
from ragspec.rules.base import Step
from ragspec.rules.walk import path_to
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.settings import Sampling, checked_number
from ragspec.sampling.transform import RowTransform, TextStart, Transform
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import depths
from ragspec.types import PreTrainedModel

ETA = 10.0
ALPHA = 0.1  # tokens move to which the model gives at least so many times its best probability
TOGETHER = 16  # nodes that are read with the root; others are read when the rule visits them
# The target reads another prompt than the drafter.
_OFFERED = Capabilities(
    hidden_states=False,
    owner="Rapid, whose target reads another prompt",
    error=InputError,
    remedy="Use ModelDrafter, or a drafter of text.",
)


class Rapid(Combined):
    """Drafts with a model that reads `draft_prompt`, or the prompt if a request has none.

    Args:
        drafter: A transformers causal model of the target's vocabulary (the target itself, too), or
            any drafter.
        eta: 0: the text follows the target's distribution. Above: it follows one between the
            target's and the model's (`Steering`), whatever is drafted.

    Raises:
        InputError: The model is missing, or `eta` is out of range.
    """

    method = Method(
        "a model that reads `draft_prompt=`",
        "RAPID",
        make=lambda sources: Rapid(sources.draft_model),
        needs=frozenset({"draft model"}),
        colour=5,
    )

    def __init__(self, drafter: object = None, *, eta: float = 0.0, name: str = "rapid") -> None:
        self.drafter = drafter if isinstance(drafter, Drafter) else ModelDrafter(drafter, name=name)
        match_drafter(self.drafter, _OFFERED)
        super().__init__(name, [self.drafter], Needs(draft_prompt=True))
        # The best tokens of the prompt are those of another prompt than the drafter's.
        self.needs = replace(self.needs, prompt_top_tokens=False)
        self.kind = self.drafter.kind
        if eta != 0.0:
            if not isinstance(self.drafter, ModelDrafter):
                raise InputError(
                    f"got the drafter {self.drafter.name!r} with eta {eta!r}; expected a draft "
                    "model, whose distribution steers."
                )
            self.transform = Steering(self.drafter.model, eta)

    def open(self, request: DraftRequest) -> "RapidSession":
        """Return a session that reads its prompt at the first proposal."""
        return RapidSession(self.drafter, request)


class RapidSession(DraftSession):
    """A drafter's session over another prompt with the same output; see `Rapid`."""

    def __init__(self, drafter: Drafter, request: DraftRequest) -> None:
        prompt = request.prompt if request.draft_prompt is None else request.draft_prompt
        if (moved := request.distribution) is not None:
            # Penalties count generated tokens, which begin at another index here.
            moved = TokenDistribution(moved.sampling, moved.noise, len(prompt))
        self._drafter = drafter
        self._request = replace(request, spans=(), draft_prompt=None, distribution=moved)
        self._tokens = list(prompt)
        self._length = len(prompt)
        self._copied: int | None = None  # tokens of the target's text that are in `_tokens`
        self._session: DraftSession | None = None

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the drafter's tree below its own prompt and the output."""
        copied = context.prompt_length if self._copied is None else self._copied
        self._tokens += context.tokens[copied:]
        self._copied = len(context.tokens)
        if self._session is None:
            self._session = self._drafter.open(replace(self._request, prompt=tuple(self._tokens)))
        # The claims of drafters within another one are corrected once, by the outermost fusion.
        adviser = None if isinstance(self._drafter, Combined) else context.adviser
        translated = DraftContext(self._tokens, self._length, context.remaining, adviser)
        return self._session.propose(translated, budget)

    def distributions(self) -> Iterable[NodeChances] | None:
        """Return the draft model's distributions at the last proposal."""
        return None if self._session is None else self._session.distributions()

    def observe(self, step: Step) -> None:
        """Pass the step to the drafter's session, if it is open."""
        if self._session is not None:
            self._session.observe(step)


def shift(p: Tensor, q: Tensor, scale: float) -> Tensor:
    """Return the term to add to the target's logits: distributions p, q [.., V] -> [.., V]."""
    return scale * (q - p) * (q >= ALPHA * q.amax(-1, keepdim=True))


class Steering(Transform):
    """Moves the target's distribution towards that of another model over another prompt.

    Once the model's context is full, or a token is not in its vocabulary, the distribution is the
    target's from there on.

    Args:
        model: A transformers causal model of the target's vocabulary, or the target itself. It
            reads `draft_prompt` in place of the prompt.
        eta: Strength: logits move by at most eta times the temperature, those of greedy text by at
            most eta.

    Raises:
        InputError: `eta` is out of range.
        UnsupportedModelError: The model has no KV cache.
    """

    def __init__(self, model: PreTrainedModel, eta: float = ETA) -> None:
        self.eta = checked_number(eta, "eta")
        self.model = draft_target(model)
        self.name = f"RAPID, eta {self.eta:g}"

    def open(self, start: TextStart) -> "SteeredText":
        """Return the steering of one text."""
        return SteeredText(start, self)


class SteeredText(RowTransform):
    """The steering of one text; see `Steering`."""

    def __init__(self, start: TextStart, steering: Steering) -> None:
        self._taken = self._compared = taken = start.distribution.without_lazy()
        if taken.sampling.greedy:  # compared at temperature 1
            rest = taken.noise, taken.prompt_length, taken.processors
            self._compared = TokenDistribution(Sampling(temperature=1.0), *rest)
        self._scale = steering.eta * self._compared.sampling.temperature
        self._text = list(start.prompt if start.draft_prompt is None else start.draft_prompt)
        self._cache = DraftCache(steering.model, start.vocab_size, len(self._text) + 256)
        self._tree = DraftTree.empty()
        self._context: Sequence[int] = ()
        self._length = len(start.prompt)  # of the target's text, whose list grows
        self._depths: list[int] = []
        self._slots: dict[int, int] = {}
        self._logits: dict[int, Tensor] = {}
        self._drifts: list[float] = []

    @property
    def drift(self) -> float:
        """Mean total variation from the target's distribution, over the visited nodes."""
        return sum(self._drifts) / max(1, len(self._drifts))

    def forward(self, states: Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Read the new tokens of the text, and the likeliest nodes of the tree."""
        fresh = list(tokens[self._length :])
        self._cache.commit(fresh)
        self._text += fresh
        self._tree, self._context, self._length = tree, tokens, len(tokens)
        self._depths = depths(tree.parents).tolist()
        self._slots.clear()
        self._logits.clear()
        if self._cache.readable(self._text):
            with self._cache.lease():
                self._logits[ROOT] = self._cache.read(self._text)
                self._slots[ROOT] = ROOT
                self._read(range(min(len(tree), TOGETHER)))

    def logits(self, node: int, logits: Tensor, index: int) -> Tensor:
        """Return the steered logits f64 [1, V] after a node, the target's if the model has none."""
        other = self._model_logits(node)
        if other is None or not self._scale:
            self._drifts.append(0.0)
            return logits
        path = self._tree.tokens[[*path_to(self._tree, node)]].tolist()
        p = self._probabilities(self._compared, logits, path)
        q = self._probabilities(self._compared, other.to(logits.device), path)
        steered = logits.double() + shift(p, q, self._scale)
        if self._compared is not self._taken:  # greedy text takes the best token alone
            p = self._probabilities(self._taken, logits, path)
        difference = (self._probabilities(self._taken, steered, path) - p).abs().sum()
        self._drifts.append(0.5 * float(difference))
        return steered

    def _probabilities(
        self, distribution: TokenDistribution, logits: Tensor, path: Sequence[int]
    ) -> Tensor:
        """Return the distribution after draft tokens: logits [1, V] -> f64 [1, V]."""
        scores = distribution.process(logits, self._context[: self._length], [path])
        return distribution.probabilities(scores)

    def _model_logits(self, node: int) -> Tensor | None:
        """Return the model's logits [1, V] after a node, None if it cannot read the text."""
        unread = node not in self._logits and ROOT in self._logits
        if unread and self._model_logits(int(self._tree.parents[node])) is not None:
            with self._cache.lease():
                self._read([node])
        return self._logits.get(node)

    def _read(self, nodes: Sequence[int]) -> None:
        """Read those nodes that the model can read in one forward, parents first."""
        tokens, parents = self._tree.tokens, self._tree.parents
        room, size = self._cache.room(self._text), self._cache.model.input_size
        slot, taken = self._cache.drafted, list[int]()
        for node in nodes:
            attached = int(parents[node]) in self._slots
            if attached and self._depths[node] < room and int(tokens[node]) < size:
                self._slots[node] = slot + len(taken)
                taken.append(node)
        if taken:
            above = [self._slots[int(parents[node])] for node in taken]
            rows = self._cache.extend([int(tokens[node]) for node in taken], above)
            self._logits.update((node, rows[i : i + 1]) for i, node in enumerate(taken))
