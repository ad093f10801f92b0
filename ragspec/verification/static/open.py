"""Open a target with steps of fixed shape, if a trial shows that its model supports them."""

from __future__ import annotations

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.models.device import is_cuda
from ragspec.models.supported import layer_windows, rank_count
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.probe import TREES, Trial
from ragspec.verification.rotary_tables import asks_for_length
from ragspec.verification.static.buffers import LayerShape
from ragspec.verification.static.step import Masks
from ragspec.verification.static.target import StaticTarget

MODES = ("auto", "off", "eager", "graph", "compile")


def open_static(
    target: CausalTarget, mode: str = "auto", backend: str = "inductor"
) -> CausalTarget:
    """Return a target with steps of fixed shape if the model supports them, else `target`.

    The `static` of the returned target is the mode, or "off" with the reason.

    Args:
        mode: See `static.target`. "auto" is "graph" on CUDA, else "off".
        backend: The backend of torch.compile.

    Raises:
        InputError: The mode is unknown, or it is "graph" without CUDA.
    """
    mode = _expect_mode(mode, target.device)
    if mode == "off" or isinstance(target, StaticTarget):
        return target
    static = _hindrance(target) or _tried(target, mode, backend)
    if isinstance(static, StaticTarget):
        return static
    target.static = f"off: {static}"
    return target


def _tried(target: CausalTarget, mode: str, backend: str) -> StaticTarget | str:
    """Return the target that passed a trial, or the reason why none did."""
    layers = _layer_shapes(target)
    if layers is None:
        return "its layers keep more than keys and values"
    windows = layer_windows(target.model.config)
    trial, stories = Trial(target), []
    named = bool(getattr(target.model.config.get_text_config(), "layer_types", None))
    for by_name in (named, not named):
        if not by_name and len(set(windows.values())) > 1:
            continue  # one mask cannot serve two kinds of layers
        static = StaticTarget(target.model, "eager", Masks(windows, by_name), layers, backend)
        attempt = trial.attempt(static.open, TREES)
        if attempt.passed:
            static.static = mode
            return static
        stories.append(attempt.story)
    return f"a step of fixed shape goes wrong here ({stories[0]})"


def _expect_mode(mode: str, device: torch.device) -> str:
    """Return the mode to use on a device."""
    if mode not in MODES:
        raise InputError(f"got static={mode!r}; expected one of {', '.join(map(repr, MODES))}.")
    if mode == "graph" and not is_cuda(device):
        raise InputError(
            f"got static='graph' for a model on {device}; expected one on a CUDA device, which "
            "alone captures graphs. Use static='auto', or 'compile'."
        )
    if mode == "auto":
        return "graph" if is_cuda(device) else "off"
    return mode


def _hindrance(target: CausalTarget) -> str:
    """Return why a target cannot take steps of fixed shape, "" for no known reason."""
    if asks_for_length(target.model):
        return "its rotary tables depend on the length of the text"
    if type(target) is not CausalTarget:
        return f"{type(target).__name__} makes its forwards in a way of its own"
    if not target.takes_positions:
        return "it counts positions by itself"
    if (ranks := rank_count(target.model)) > 1:
        return f"its weights are cut among {ranks} ranks"
    devices = {str(p.device) for p in target.model.parameters()}
    if len(devices) > 1:
        return f"it lies on several devices ({', '.join(sorted(devices))})"
    return ""


def _layer_shapes(target: CausalTarget) -> list[tuple[LayerShape, LayerShape]] | None:
    """Return the shapes of keys and values of each layer, measured by one forward."""
    with target.open(1, 1) as session:
        session.verify([[0]], [DraftTree.empty()])
        layers = session.active_rows[0].cache.layers(1)
    if sorted(layers) != list(range(len(layers))):
        return None  # a layer without keys and values
    return [(_shape(keys), _shape(values)) for _, (keys, values) in sorted(layers.items())]


def _shape(buffer: Tensor) -> LayerShape:
    _, heads, _, width = buffer.shape
    return LayerShape(heads, width, buffer.dtype, buffer.device)
