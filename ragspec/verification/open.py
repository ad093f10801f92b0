"""Check and probe a model and open it as a target.

ONNX Runtime, or steps of fixed shape, are used if a trial shows that they suit the model.
"""

import gc
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from ragspec.errors import UnsupportedModelError
from ragspec.models.block_linear import SESSIONS
from ragspec.models.checks import check_runtime, check_static
from ragspec.models.device import as_loaded, is_cuda, release_memory
from ragspec.models.load import DeviceMap, load_model
from ragspec.models.quantized import SMALL, stored_small
from ragspec.models.resolve import head_folder, next_tokens_file
from ragspec.models.supported import check_scope, layer_windows, rank_count, unwrapped
from ragspec.trees.draft_tree import DraftTree
from ragspec.types import PreTrainedModel, Tokenizer
from ragspec.verification.causal import CausalTarget
from ragspec.verification.onnx.cached_graph import cached_graph
from ragspec.verification.onnx.form import foreign, hindrance
from ragspec.verification.onnx.target import OnnxTarget
from ragspec.verification.path_rows import PathTarget
from ragspec.verification.probe import TREES, Trial, probe, probe_target
from ragspec.verification.reading import asks_for_length
from ragspec.verification.static.runner import StepRunner
from ragspec.verification.static.step import Masks


def open_target(
    model: PreTrainedModel, static: str = "auto", runtime: str = "auto"
) -> CausalTarget:
    """Return the target over a model that passed the load-time probe.

    Args:
        static: See `open_static`.
        runtime: What runs forwards: "torch"; "onnx", ONNX Runtime, which is faster on a CPU; or
            "auto", ONNX Runtime for models that it can run.

    Raises:
        UnsupportedModelError: The model is outside the scope, or ONNX Runtime was asked for and
            cannot run it. The message has the reason.
        InputError: The mode or the runtime is unknown, or the device lacks the mode.
    """
    check_scope(model)
    target, reason = CausalTarget(model), ""
    check_runtime(runtime, target.device, "auto", static)
    if runtime != "torch" and static in ("auto", "off") and not is_cuda(target.device):
        reason = hindrance(target)
        if not reason:
            with as_loaded(target.device):
                opened = _on_onnx(model)
            if isinstance(opened, CausalTarget):
                opened.probed = opened.kinds
                return opened
            reason = opened
    if runtime == "onnx":
        raise UnsupportedModelError(
            f"ONNX Runtime cannot run {type(model).__name__}: {reason}. Use runtime='auto'."
        )
    with as_loaded(target.device):
        target = open_static(probe_target(target), static)
    target.detour, target.probed = reason, target.kinds
    return target


def load_target(
    name: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    *,
    device_map: DeviceMap = None,
    adapter: str | Path | None = None,
    static: str = "auto",
    runtime: str = "auto",
) -> tuple[CausalTarget, Tokenizer]:
    """Return (target, tokenizer) of a model given by path or name.

    One in 8 or 4 bits that runs on ONNX Runtime is opened from its cached graph; see `CachedGraph`.

    Args:
        device, dtype, device_map, adapter: See `load_model`; "auto" stores large models in 8 bits.
        static, runtime: See `open_target`.

    Raises:
        MissingModelError, ModelError, UnsupportedModelError, InputError: As for these two.
    """
    check_runtime(runtime, device, dtype, static)
    cached = None
    plain = device_map is None and adapter is None and dtype in ("auto", *SMALL)
    if plain and runtime in ("auto", "onnx") and static in ("auto", "off"):
        cached = cached_graph(name, device, str(dtype))
    opened = None if cached is None else cached.open()
    if opened is None:
        model, tokenizer = load_model(name, device, dtype, device_map=device_map, adapter=adapter)
        if dtype == "auto" and runtime != "torch" and not foreign(model):
            model = stored_small(model)
        target = open_target(model, static, runtime)
        opened = target, tokenizer
        if cached is not None and isinstance(target, OnnxTarget) and target.chains:
            cached.keep(target, tokenizer)
            opened = cached.open() or opened  # which maps what the model holds in memory
            del model, target
            gc.collect()  # they refer to themselves
    release_memory()  # what reading files took
    if adapter is None:
        opened[0].head_folder, opened[0].next_tokens = head_folder(name), next_tokens_file(name)
    return opened


def probe_again(target: CausalTarget) -> None:
    """Probe a model again that was cast or quantised since the last probe.

    Raises:
        UnsupportedModelError: The probe refuses the model as it is now.
    """
    fresh = CausalTarget(target.model)
    with as_loaded(fresh.device):
        verdict = probe(fresh)
    if verdict.mode not in (("tree", "chain") if isinstance(target, PathTarget) else ("tree",)):
        raise UnsupportedModelError(
            f"{type(unwrapped(target.model)).__name__} was cast or quantised after it was opened, "
            f"and the probe refuses it as it is now: {verdict.reason}. Expected a model that is "
            "verified as before. Open another engine over it, or undo the change."
        )
    target.packs, target.probed = target.packs and fresh.packs, fresh.kinds


def _on_onnx(model: PreTrainedModel) -> CausalTarget | str:
    """Return the target on ONNX Runtime if it passes the probe; else why it does not."""
    try:
        target = OnnxTarget(model)
    except Exception as error:  # the runtime has no tree of errors
        return f"{type(error).__name__}: {error}"[:200]
    verdict = probe(target)
    SESSIONS.clear()  # those of the reference
    release_memory()
    return target if verdict.mode == "tree" else verdict.reason


def open_static(target: CausalTarget, mode: str, backend: str = "inductor") -> CausalTarget:
    """Return a target with steps of fixed shape if the model supports them, else `target`.

    The `static` of the returned target is the mode, or "off" with the reason.

    Args:
        mode: See `static.runner`. "auto" is "graph" on CUDA, else "off".
        backend: The backend of torch.compile.

    Raises:
        InputError: The mode is unknown, or it is "graph" without CUDA.
    """
    check_static(mode, target.device)
    if mode == "auto":
        mode = "graph" if is_cuda(target.device) else "off"
    if mode == "off" or target.fixed_steps is not None:
        return target
    target.refusal = _hindrance(target)
    return target if target.refusal else _tried(target, mode, backend)


def _tried(target: CausalTarget, mode: str, backend: str) -> CausalTarget:
    """Return the target with steps that passed a trial, or without them if none did."""
    layers = _states(target)
    if layers is None:
        target.refusal = "its layers keep more than keys and values"
        return target
    windows = layer_windows(target.model.config)
    trial, stories, static = Trial(target), [], copy(target)
    named = bool(getattr(target.model.config.get_text_config(), "layer_types", None))
    for by_name in (named, not named):
        if not by_name and len(set(windows.values())) > 1:
            continue  # one mask cannot serve two kinds of layers
        masks = Masks(windows, by_name)
        static.fixed_steps = StepRunner(target.model, "eager", masks, layers, backend)
        attempt = trial.attempt(static.open, TREES)
        if attempt.passed:
            static.fixed_steps.mode = mode
            return static
        stories.append(attempt.story)
    target.refusal = f"a step of fixed shape goes wrong here ({stories[0]})"
    return target


def _hindrance(target: CausalTarget) -> str:
    """Return why a target cannot take steps of fixed shape, "" for no known reason."""
    if asks_for_length(target.model):
        return "its rotary tables depend on the length of the text"
    if type(target) is not CausalTarget:
        return f"{type(target).__name__} makes its forwards in a way of its own"
    if (ranks := rank_count(target.model)) > 1:
        return f"its weights are cut among {ranks} ranks"
    devices = {str(p.device) for p in target.model.parameters()}
    return f"it lies on several devices ({', '.join(sorted(devices))})" if len(devices) > 1 else ""


def _states(target: CausalTarget) -> list[tuple[Tensor, Tensor]] | None:
    """Return the keys and values of a token in each layer; None if one has other states."""
    with target.open(1, 1) as session:
        session.verify([[0]], [DraftTree.empty()])
        session.commit([()])
        layers = session.active_rows[0].cache.layers(1)
    numbers = sorted(layers)
    return [layers[i] for i in numbers] if numbers == list(range(len(layers))) else None
