"""The load-time probe: may this model verify trees?

A wrong mask or position gives wrong logits without an error, so before a model is used the logits
of random trees are compared with those of their paths, each run alone and whole by the model as
it was found. Two rows of unequal length, and a second tree after the first one's accepted path
was kept, so that ragged batches, positions, sliding windows and compaction are all in it. A model
that fails is tried on chains, then on path rows (`path_rows`), else refused with the figures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ragspec.errors import UnsupportedModelError
from ragspec.models.supported import state_layers
from ragspec.storage import json_cache
from ragspec.target.causal import CausalTarget
from ragspec.target.path_rows import PathTarget
from ragspec.target.probe_trial import CHAINS, TREES, Attempt, Trial, shortest_window

FORMAT = 3
_DONE = {"peft.": "adapter", "quant": "quantised"}  # by the packages that modules come from
_RIGHT = {
    "tree": "trees give the logits of their paths",
    "chain": "chains over the model's own cache are right",
    "rows": "path rows over the model's own cache are right",
}
_LOOKS_AHEAD = (
    "its logits depend on later tokens of the same forward (dynamic quantisation with one scale "
    "per tensor?); use weight-only or per-token quantisation"
)


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """What a model may be used for, and the figures behind it.

    mode: "tree", "chain", "rows" or "refused". error: largest difference of two logits between
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


def probe_target(target: CausalTarget, directory: Path | None) -> Probed:
    """Return the target to use for a model, which is `target` itself where trees are right.

    directory: where verdicts are kept (see `json_cache`); None: probe afresh. Raises
    UnsupportedModelError for a refused model.
    """
    verdict = cached(target, directory) if directory is not None else probe(target)
    if verdict.mode == "refused":
        name = type(target.model).__name__
        raise UnsupportedModelError(
            f"{name} was refused by the load-time probe: {verdict.reason}. Expected logits of a "
            "draft that equal those of plain decoding. Use another model, or call its own generate."
        )
    if verdict.mode == "tree":
        return Probed(target, verdict)
    return Probed(PathTarget(target.model, verdict.mode), verdict)


def cached(target: CausalTarget, directory: Path) -> ProbeVerdict:
    """Return the verdict kept under `directory` for this architecture, or probe and keep it.

    A refusal is not kept: its cause may be damaged weights or the state of the machine, and would
    be held against every other checkpoint of the architecture.
    """
    key = probe_key(target)
    kept = json_cache.read(directory, "probe", key)
    with contextlib.suppress(TypeError):  # damage that left it JSON
        if kept is not None:
            return ProbeVerdict(**kept)
    verdict = probe(target)
    if verdict.mode != "refused":
        json_cache.write(directory, "probe", key, asdict(verdict))
    return verdict


def probe_key(target: CausalTarget) -> dict[str, str]:
    """Return what a verdict is valid for: code, configuration, dtype and device; not the weights.

    Adapters count through the classes of the modules, quantised weights through their own.
    """
    model = target.model
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        config.pop(name, None)
    modules = sorted({f"{type(m).__module__}.{type(m).__qualname__}" for m in model.modules()})
    text = json.dumps([config, modules], sort_keys=True, default=str)
    return {
        "format": str(FORMAT),
        "model": type(model).__name__,
        "variant": _variant(model),
        "architecture": hashlib.sha256(text.encode()).hexdigest()[:24],
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "training": str(model.training),
        "dtype": str(target.dtype),
        "device": target.device.type,
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def _variant(model: Any) -> str:
    """Return in words what was done to a model after it was made: "" for nothing."""
    config = getattr(model.config, "quantization_config", None)
    given = config if isinstance(config, dict) else vars(config) if config is not None else {}
    method = given.get("quant_method", "")
    words = [str(getattr(method, "value", method))]
    modules = {type(module).__module__ for module in model.modules()}
    words += [word for part, word in _DONE.items() if any(part in name for name in modules)]
    weights = list(model.parameters())
    words += sorted({type(weight).__name__ for weight in weights} - {"Parameter"})
    words += ["offloaded"] * any(weight.device.type == "meta" for weight in weights)
    return ", ".join(dict.fromkeys(filter(None, words)))


def probe(target: CausalTarget) -> ProbeVerdict:
    """Return how the model may be used; three forwards of ours against two of the model's own."""
    try:
        trial = Trial(target)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever a foreign model may raise is its verdict
        reason = f"its own forward fails on plain text ({type(error).__name__}: {error})"[:400]
        return ProbeVerdict("refused", reason, math.inf, 0.0, 0)
    if math.isnan(trial.scale):
        reason = "its own logits are NaN on plain text: its weights are damaged or overflow"
        return ProbeVerdict("refused", reason, math.inf, 0.0, trial.prefix)
    attempt = trial.attempt(target.open, TREES)
    if attempt.passed:
        return _verdict(trial, "tree", attempt, _RIGHT["tree"])
    states = ", ".join(sorted(state_layers(target.model.config)))
    cause = f"layers that keep a state ({states}) know no trees" if states else attempt.story
    why = f"tree attention goes wrong here ({cause})"
    for mode, stages in (("chain", CHAINS), ("rows", TREES)):
        path_target = PathTarget(target.model, mode)
        second = trial.attempt(path_target.open, stages)
        if second.passed:
            return _verdict(trial, mode, second, f"{why}; {_RIGHT[mode]}")
        why += f", {mode} too ({second.story})"
    if target.model.training:
        why += "; the model is in training mode, call model.eval()"
    elif trial.looks_ahead():
        why = _LOOKS_AHEAD
    return _verdict(trial, "refused", attempt, why)


def _verdict(trial: Trial, mode: str, attempt: Attempt, reason: str) -> ProbeVerdict:
    """Return the verdict, which says so where a window was too long to be crossed."""
    window = shortest_window(trial.target)
    if mode != "refused" and window is not None and trial.prefix <= window:
        reason += f" (its window of {window} tokens was too long to be crossed)"
    return ProbeVerdict(mode, reason, attempt.error, attempt.tolerance, trial.prefix)
