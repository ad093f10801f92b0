"""The load-time probe: may this model verify trees?

A wrong mask or position gives wrong logits without an error, so before a model is used the logits
of random trees are compared with those of their paths, each run alone and whole by the model as
it was found. Two rows of unequal length, and a second tree after the first one's accepted path
was kept, so that ragged batches, positions, sliding windows and compaction are all in it. A model
that fails is tried on chains over its own cache (`path_rows`), else refused with the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ragspec.errors import UnsupportedModelError
from ragspec.models.supported import foreign_layers, slot_limit, state_layers, unwrapped
from ragspec.verification.causal import CausalTarget
from ragspec.verification.path_rows import PathTarget, ShortTreeTarget
from ragspec.verification.probe_trial import CHAINS, TREES, Attempt, Trial, shortest_window

_LOOKS_AHEAD = (
    "its logits depend on later tokens of the same forward (attention to both sides, or dynamic "
    "quantisation with one scale per tensor?); use a model that attends to the left alone, and "
    "weight-only or per-token quantisation"
)
_TRAINING = "two equal forwards differ: the model is in training mode, call model.eval()"


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """What a model may be used for, and the figures behind it.

    mode: "tree", "chain" or "refused". error: largest difference of two logits between
    a draft verified in that mode (refused: as a tree) and its paths run alone, infinite where the
    model raised. tolerance: what rounding may do in this dtype. prefix: tokens before the draft.
    """

    mode: str
    reason: str
    error: float
    tolerance: float
    prefix: int


class Probed(NamedTuple):
    """A target that verifies in the way that its model can, and the verdict on the model."""

    target: CausalTarget
    verdict: ProbeVerdict


def probe_target(target: CausalTarget) -> Probed:
    """Return the target to use for a model, which is `target` itself where trees are right.

    Raises UnsupportedModelError for a refused model.
    """
    verdict = probe(target)
    if verdict.mode == "refused":
        name = type(unwrapped(target.model)).__name__
        raise UnsupportedModelError(
            f"{name} was refused by the load-time probe: {verdict.reason}. Expected logits of a "
            "draft that equal those of plain decoding. Use another model, or call its own generate."
        )
    if verdict.mode != "tree":
        return Probed(PathTarget(target.model), verdict)
    limit = slot_limit(target.model.config)
    if limit is None and target.border is None:
        return Probed(target, verdict)
    return Probed(ShortTreeTarget(target.model, limit), verdict)


def probe(target: CausalTarget) -> ProbeVerdict:
    """Return how the model may be used; four forwards of ours against four of the model's own."""
    try:
        trial = Trial(target)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever a foreign model may raise is its verdict
        reason = f"its own forward fails on plain text ({type(error).__name__}: {error})"[:400]
        return ProbeVerdict("refused", reason, math.inf, 0.0, 0)
    if not math.isfinite(trial.scale):
        kind = "NaN" if math.isnan(trial.scale) else "infinite"
        reason = f"its own logits are {kind} on plain text: its weights are damaged or overflow"
        return ProbeVerdict("refused", reason, math.inf, 0.0, trial.prefix)
    if unwrapped(target.model).training and trial.wavers():
        return ProbeVerdict("refused", _TRAINING, math.inf, 0.0, trial.prefix)
    attempt = trial.attempt(target.open, TREES)
    if attempt.passed:
        return _verdict(trial, "tree", attempt, "trees give the logits of their paths")
    why = f"tree attention goes wrong here ({_cause(target) or attempt.story})"
    second = trial.attempt(PathTarget(target.model).open, CHAINS)
    if second.passed:
        reason = f"{why}; chains over the model's own cache are right"
        return _verdict(trial, "chain", second, reason)
    why += f", chain too ({second.story})"
    if trial.looks_ahead():
        why = _LOOKS_AHEAD
    return _verdict(trial, "refused", attempt, why)


def _cause(target: CausalTarget) -> str:
    """Return why a model cannot verify trees where its code says so; "" where it does not."""
    config = target.model.config
    if states := ", ".join(sorted(state_layers(config))):
        return f"layers that keep a state ({states}) know no trees"
    if layers := ", ".join(sorted(foreign_layers(config))):
        return f"its cache holds more than keys and values ({layers})"
    if not target.takes_positions:
        return "it counts positions by itself (it takes no position_ids): no two may share one"
    return ""


def _verdict(trial: Trial, mode: str, attempt: Attempt, reason: str) -> ProbeVerdict:
    """Return the verdict, which says so where a window was too long to be crossed."""
    window = shortest_window(trial.target)
    if mode != "refused" and window is not None and trial.prefix <= window:
        reason += f" (its window of {window} tokens was too long to be crossed)"
    return ProbeVerdict(mode, reason, attempt.error, attempt.tolerance, trial.prefix)
