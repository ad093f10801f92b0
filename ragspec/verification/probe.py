"""The load-time probe: compares logits of verified drafts with those of each path run alone.

The probe has two rows of unequal length, a step without a draft, and drafts after an accepted path.
So it covers ragged batches, positions, windows and compaction. The reference is the unmodified
model, over whole texts and without a cache.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragspec.errors import UnsupportedModelError
from ragspec.models.device import out_of_memory
from ragspec.models.quantized import SMALL
from ragspec.models.supported import counts_slots, foreign_layers, state_layers, unwrapped
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import ancestors
from ragspec.verification.base import TargetSession
from ragspec.verification.causal import CausalTarget
from ragspec.verification.path_rows import PathTarget

PREFIXES = (12, 7)
AFFORDED = 2.0  # seconds that crossing a long window may take on a CPU
# Tolerances in units of the dtype's epsilon times the largest logit. Models compute norms and
# softmax in float32 at best, and half precision rounds at every product.
ROUNDING = 1000.0
HALF_ROUNDING = 4.0
NOISE = 8.0  # tolerance in units of the difference between two batch shapes
SENSE = 0.25  # limit of the tolerance, in units of the logits' standard deviation
QUANTILE = 0.75  # of errors in half precision: near-ties of routed experts spoil single nodes

_BUSHY = (-1, 0, 1, 0, 3, -1, 5, 6)
_FORK = (-1, -1, 1)
_CHAIN = (-1, 0, 1, 2)
# For each stage and both rows: the parents of the tree and the accepted nodes. The first stage is a
# step of plain decoding, because some recurrent models have separate code for a single token.
_PLAIN = (((), ()), ((), ()))
TREES = (_PLAIN, ((_BUSHY, (0, 3, 4)), (_FORK, (1, 2))), ((_FORK, (0,)), (_BUSHY, (5, 6, 7))))
CHAINS = (
    _PLAIN,
    ((_CHAIN, (0, 1)), (_CHAIN, (0, 1, 2, 3))),
    ((_CHAIN, ()), (_CHAIN, (0,))),
    ((_CHAIN, ()), (_CHAIN, ())),
)

Stages = Sequence[Sequence[tuple[Sequence[int], tuple[int, ...]]]]
# One row of the probe: a prompt, then (root token, tree, accepted nodes) per stage.
Case = tuple[list[int], list[tuple[int, DraftTree, tuple[int, ...]]]]


@dataclass(frozen=True, slots=True)
class ProbeAttempt:
    """The error of one verification method and its tolerance, or the exception it raised."""

    error: float
    tolerance: float
    raised: str = ""

    @property
    def passed(self) -> bool:
        """Whether no exception was raised and the error is within the tolerance."""
        return not self.raised and self.error <= self.tolerance

    @property
    def story(self) -> str:
        """A short description of the failure."""
        if self.raised:
            return self.raised
        return f"logits are off by {self.error:.2g}, tolerance {self.tolerance:.2g}"


class Trial:
    """Runs one model by several methods on the same tokens and compares the logits."""

    def __init__(self, target: CausalTarget) -> None:
        rounds_inputs = target.weights in SMALL  # to 8 bits, as many as bfloat16 has
        self.target = target
        self.precision = torch.finfo(torch.bfloat16 if rounds_inputs else target.dtype)
        self.generator = torch.Generator().manual_seed(0)
        self.vocabulary = _plain_tokens(target)
        self.prefix = PREFIXES[0]
        self.scale, self.deviation, self.noise, seconds = self._survey()
        self.prefix = self._long_prefix(seconds)

    def attempt(self, opened: Callable[[int, int], TargetSession], stages: Stages) -> ProbeAttempt:
        """Verify these stages in a session of `opened` and compare the logits."""
        lengths = (self.prefix, PREFIXES[1])
        cases = [self._case(n, [stage[row] for stage in stages]) for row, n in enumerate(lengths)]
        tolerance = min(max(self._rounding(), NOISE * self.noise), SENSE * self.deviation)
        try:
            logits = list(self._verified(opened, cases))
        except Exception as raised:  # a third-party model may raise anything
            if out_of_memory(raised):
                raise
            return ProbeAttempt(math.inf, tolerance, f"{type(raised).__name__}: {raised}"[:200])
        expected = [self._expected(case) for case in cases]
        worst = torch.cat([_difference(a, b) for a, b in zip(logits, expected, strict=True)])
        error = float(worst.quantile(QUANTILE) if self.precision.bits < 32 else worst.max())
        return ProbeAttempt(math.inf if math.isnan(error) else error, tolerance)

    def wavers(self) -> bool:
        """Return whether two equal forwards differ, as with dropout."""
        text = [self._tokens(PREFIXES[0])]
        one, other = (self._alone(text, PREFIXES[0])[0] for _ in range(2))
        return bool(_difference(one, other).max() > self._rounding())

    def looks_ahead(self) -> bool:
        """Return whether logits depend on later tokens, tested with two endings of one text."""
        n, prefix = PREFIXES[0], self._tokens(PREFIXES[0])
        texts = [[*prefix, *self._tokens(n)] for _ in range(2)]
        one, other = (self._alone([text], 2 * n)[0, :n] for text in texts)
        # The median, since near-ties of routed experts spoil single positions.
        return bool(_difference(one, other).median() > self._rounding())

    def _rounding(self) -> float:
        if self.precision.bits < 32:
            return HALF_ROUNDING * self.precision.eps * self.scale
        return ROUNDING * torch.finfo(torch.float32).eps * self.scale

    def _survey(self) -> tuple[float, float, float, float]:
        """Return the largest logit, the deviation, the noise of batching, and seconds per token."""
        texts = [self._tokens(2 * self.prefix) for _ in range(2)]
        together = self._alone(texts, self.prefix)
        start = time.perf_counter()
        single = self._alone(texts[:1], self.prefix)
        self.target.synchronize()
        seconds = (time.perf_counter() - start) / len(texts[0])
        logits = together.float()
        noise = float(_difference(together[0], single[0]).median())
        return float(logits.abs().max()), float(logits.std()), noise, seconds

    def _long_prefix(self, seconds: float) -> int:
        """Return a prefix length that crosses the model's window, if that is fast enough."""
        window = shortest_window(self.target)
        limit = self.target.max_length
        if window is None or window < PREFIXES[1] or (limit and window + 24 > limit):
            return self.prefix
        rows = 6  # four paths run alone, the session, and a margin
        on_cpu = self.target.device.type == "cpu"
        cost = rows * window * seconds if on_cpu else AFFORDED * window / 8192
        return window + 3 if cost <= AFFORDED else self.prefix

    def _tokens(self, n: int) -> list[int]:
        picked = torch.randperm(len(self.vocabulary), generator=self.generator)
        if n > len(picked):
            picked = picked.repeat(n // len(picked) + 1)
        return [self.vocabulary[i] for i in picked[:n].tolist()]

    def _case(self, length: int, shapes: Sequence[tuple[Sequence[int], tuple[int, ...]]]) -> Case:
        stages = []
        for parents, accepted in shapes:
            root, *tokens = self._tokens(len(parents) + 1) if parents else self.vocabulary[:1]
            stages.append((root, DraftTree.build(tokens, parents, "probe"), accepted))
        return self._tokens(length), stages

    def _alone(self, sequences: list[list[int]], keep: int) -> Tensor:
        """Return the last `keep` logits of equally long sequences, by the unmodified model."""
        ids = torch.tensor(sequences, device=self.target.device)
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        logits: Tensor = self.target.call(ids, places, keep, use_cache=False).logits
        return logits[:, -keep:]

    def _expected(self, case: Case) -> Tensor:
        """Return the logits of all roots and nodes of a case, each path run as plain text.

        Later tokens do not change the logits of a position, so shorter paths are padded.
        """
        prompt, stages = case
        texts, context = list[list[int]](), prompt  # up to each root and node
        for root, tree, accepted in stages:
            context = [*context, root]
            paths = [tree.tokens[path].tolist() for path in ancestors(tree.parents)]
            texts += [context, *([*context, *path] for path in paths)]
            context = [*context, *tree.tokens[list(accepted)].tolist()]
        whole: list[list[int]] = []  # those that no other continues
        for text in sorted(texts, key=len, reverse=True):
            if not any(other[: len(text)] == text for other in whole):
                whole.append(text)
        longest, start = len(whole[0]), len(prompt)
        filled = [[*text, *text[-1:] * (longest - len(text))] for text in whole]
        rows = [[other[: len(text)] for other in whole].index(text) for text in texts]
        logits = self._alone(filled, longest - start)
        return logits[rows, [len(text) - 1 - start for text in texts]]

    def _verified(
        self, opened: Callable[[int, int], TargetSession], cases: Sequence[Case]
    ) -> Iterator[Tensor]:
        """Yield for each case the logits of the same positions, verified in a session."""
        verified: list[list[Tensor]] = [[] for _ in cases]
        prompts, stages = zip(*cases, strict=True)
        with opened(len(cases), self.prefix + 32) as session:
            session.verify(prompts, [DraftTree.empty()] * len(cases))
            session.commit([()] * len(cases))
            for stage in zip(*stages, strict=True):
                logits = session.verify([[root] for root, _, _ in stage], [t for _, t, _ in stage])
                for row, (_, tree, _) in enumerate(stage):
                    verified[row].append(logits[row][: len(tree) + 1])
                session.commit([accepted for _, _, accepted in stage])
        yield from (torch.cat(parts) for parts in verified)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest absolute difference at each position: two [K, V] -> [K]."""
    exact = torch.promote_types(a.dtype, torch.float32)
    return (a.to(exact) - b.to(exact)).abs().amax(-1)


def shortest_window(target: CausalTarget) -> int | None:
    """Return the shortest attention window or chunk of the configuration, None for none."""
    text = target.model.config.get_text_config()
    names = ("sliding_window", "attention_chunk_size", "window_size")
    sizes = [getattr(text, name, None) for name in names]
    return min((n for n in sizes if isinstance(n, int) and n > 0), default=None)


def _plain_tokens(target: CausalTarget) -> list[int]:
    """Return token ids without special ones of the configuration: padding, images, ends."""
    config = target.model.config.to_dict() | target.model.config.get_text_config().to_dict()
    special = [v for k, v in config.items() if k.endswith(("token_id", "token_index"))]
    low = min(100, target.vocab_size // 4)
    usable = range(low, min(target.vocab_size, low + 1024))
    return [token for token in usable if token not in special] or list(range(target.vocab_size))


_LOOKS_AHEAD = (
    "its logits depend on later tokens of the same forward (attention to both sides, or dynamic "
    "quantisation with one scale per tensor?); use a model that attends to the left alone, and "
    "weight-only or per-token quantisation"
)


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """The verification mode of a model, and the measurements behind it.

    Attributes:
        mode: "tree", "chain" or "refused".
        error: The largest difference of logits between a draft verified in that mode (if refused,
            as a chain) and its paths run alone. Infinite if the model raised an exception.
        tolerance: The largest error that rounding may cause in this dtype.
        prefix: Tokens before the draft.
    """

    mode: str
    reason: str
    error: float = math.inf
    tolerance: float = 0.0
    prefix: int = 0


def probe_target(target: CausalTarget) -> CausalTarget:
    """Return the target to use for a model: `target` itself if it verifies trees correctly.

    Raises:
        UnsupportedModelError: The probe refuses the model.
    """
    verdict = probe(target)
    if verdict.mode == "refused":
        name = type(unwrapped(target.model)).__name__
        raise UnsupportedModelError(
            f"{name} was refused by the load-time probe: {verdict.reason}. Expected logits of a "
            "draft that equal those of plain decoding. Use another model, or call its own generate."
        )
    return target if verdict.mode == "tree" else PathTarget(target.model)


def probe(target: CausalTarget) -> ProbeVerdict:
    """Return the mode of a model, by comparing four forwards with four of the model itself."""
    try:
        trial = Trial(target)
    except Exception as error:  # a third-party model may raise anything
        if out_of_memory(error):
            raise
        reason = f"its own forward fails on plain text ({type(error).__name__}: {error})"[:400]
        return ProbeVerdict("refused", f"{reason}. Hooks or adapter_names may be the cause")
    if not math.isfinite(trial.scale):
        kind = "NaN" if math.isnan(trial.scale) else "infinite"
        reason = f"its own logits are {kind} on plain text: its weights are damaged or overflow"
        return ProbeVerdict("refused", reason)
    if unwrapped(target.model).training and trial.wavers():
        reason = "two equal forwards differ: the model is in training mode, call model.eval()"
        return ProbeVerdict("refused", reason)
    stages = CHAINS if target.chains else TREES
    # Tolerances of half precision pass trees whose distances or masks are off by a few slots.
    why = "" if target.chains else _cause(target)
    attempt = ProbeAttempt(math.inf, 0.0, why) if why else trial.attempt(target.open, stages)
    if not attempt.passed and target.packs and not why:
        target.packs = False  # one sequence a forward
        attempt = trial.attempt(target.open, stages)
    if attempt.passed:
        return _verdict(trial, "tree", attempt, "drafts give the logits of their paths")
    why = f"tree attention goes wrong here ({attempt.story})"
    second = trial.attempt(PathTarget(target.model).open, CHAINS)
    if second.passed:
        why += "; chains over the model's own cache are right"
        return _verdict(trial, "chain", second, why)
    why = _LOOKS_AHEAD if trial.looks_ahead() else f"{why}, chain too ({second.story})"
    return _verdict(trial, "refused", second, why)


def _cause(target: CausalTarget) -> str:
    """Return why a model cannot verify trees if its code shows it, else ""."""
    config = target.model.config
    if states := ", ".join(sorted(state_layers(config))):
        return f"layers that keep a state ({states}) know no trees"
    if layers := ", ".join(sorted(foreign_layers(config))):
        return f"its cache holds more than keys and values ({layers})"
    if not target.takes_positions:
        return "it counts positions by itself (it takes no position_ids): no two may share one"
    if part := counts_slots(config):
        return f"{part} by slot in the cache, and a tree has more slots than positions"
    return ""


def _verdict(trial: Trial, mode: str, attempt: ProbeAttempt, reason: str) -> ProbeVerdict:
    """Return the verdict. Its reason notes a window that was too long to be crossed."""
    window = shortest_window(trial.target)
    if mode != "refused" and window is not None and trial.prefix <= window:
        reason += f" (its window of {window} tokens was too long to be crossed)"
    return ProbeVerdict(mode, reason, attempt.error, attempt.tolerance, trial.prefix)
