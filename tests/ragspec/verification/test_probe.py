"""The load-time probe: its verdicts, and the faults that it detects."""

import copy
from math import nan, prod
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

from ragspec.errors import UnsupportedModelError
from ragspec.verification import tree_attention, tree_session
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import load_target
from ragspec.verification.path_rows import PathTarget
from ragspec.verification.probe import PREFIXES, Trial, probe, probe_target, shortest_window
from ragspec.verification.sequence_cache import SequenceCache
from tests.ragspec.verification.test_causal import by_slot, chains_only
from tests.support.architectures import build
from tests.support.sessions import shapes_fed


def changed(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    """Return a copy of a model, to be changed."""
    return copy.deepcopy(build(name, dtype))


# The error in float32 depends on the order in which a processor adds products up.
@pytest.mark.parametrize(("dtype", "share"), [(torch.float64, 1e-10), (torch.float32, 0.02)])
def test_trees_are_verified_within_the_tolerance(dtype: torch.dtype, share: float) -> None:
    verdict = probe(CausalTarget(build("llama", dtype)))
    assert verdict.mode == "tree"
    assert verdict.error < share * verdict.tolerance
    assert verdict.tolerance < 1e-3


def test_the_probe_is_a_handful_of_short_forwards() -> None:
    model = changed()
    target, known = CausalTarget(model), shapes_fed(model)
    probe(target)
    assert 0 < len(known) <= 8
    assert sum(map(prod, known)) < 400


def test_the_prefix_crosses_windows_of_affordable_size() -> None:
    assert probe(CausalTarget(build("mistral"))).prefix > 8
    far = changed("mistral")
    far.config.sliding_window = 100
    assert probe(CausalTarget(far)).prefix == 103
    unaffordable = changed("mistral")
    unaffordable.config.sliding_window = 1 << 30
    verdict = probe(CausalTarget(unaffordable))
    assert verdict.prefix == PREFIXES[0]
    assert "too long to be crossed" in verdict.reason


def test_the_shortest_window_counts() -> None:
    assert shortest_window(CausalTarget(build("llama"))) is None
    assert shortest_window(CausalTarget(build("gemma3_text"))) == 8
    assert shortest_window(CausalTarget(build("llama4_text"))) == 8


# --- mutants of the target: each must be caught ---------------------------------------------------


MOVE = SequenceCache.move


def sees_everything(view: Any, mask_function: Any, first: int = 0) -> torch.Tensor:
    slots = view.length + view.slot_positions.shape[1]
    return torch.ones(*view.positions.shape, slots - first, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        ((tree_session, "_related", chains_only), "llama"),
        ((tree_session, "_layout", by_slot), "llama"),
        ((SequenceCache, "move", lambda cache, source, start: None), "llama"),
        ((SequenceCache, "move", lambda cache, at, start: MOVE(cache, at - 1, start)), "llama"),
        ((tree_attention, "_model_allows", sees_everything), "mistral"),
    ],
    ids=["mask", "positions", "no-compaction", "off-by-one", "no-window"],
)
def test_a_broken_target_is_caught(
    mutant: Any, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*mutant)
    verdict = probe(CausalTarget(build(name, dtype)))
    assert verdict.mode == "chain", verdict
    assert "logits are off by" in verdict.reason


@pytest.mark.parametrize(
    ("place", "name", "mutant"),
    [(tree_session, "_related", chains_only), (SequenceCache, "move", lambda *_: None)],
)
def test_a_trained_model_in_8_bits_passes_and_a_broken_one_is_caught(
    place: Any, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = load_target("starter", "cpu", "int8", runtime="torch")
    assert type(target) is CausalTarget and target.rounds  # so texts are exact up to rounding
    monkeypatch.setattr(place, name, mutant)
    assert probe(target).mode == "chain"


def test_a_model_that_fails_in_every_mode_is_refused() -> None:
    model = changed("bloom")
    model.forward = lambda **kwargs: without_cache(model, **kwargs)
    target = CausalTarget(model)
    with pytest.raises(UnsupportedModelError, match="off by") as caught:
        probe_target(target)
    assert "BloomForCausalLM was refused" in str(caught.value)
    assert "chain too" in str(caught.value)


def test_damaged_weights_are_named() -> None:
    damaged = changed()
    with torch.no_grad():
        damaged.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UnsupportedModelError, match=r"logits are NaN.*weights are damaged"):
        probe_target(CausalTarget(damaged))
    assert not isinstance(probe_target(CausalTarget(changed())), PathTarget)


def without_cache(model: Any, **kwargs: Any) -> Any:
    """Run a model that forgets its cache."""
    out = type(model).forward(model, **kwargs)
    out.past_key_values = None
    return out


@pytest.mark.parametrize("dropout", [0.01, 0.5])
def test_training_mode_is_named_as_a_cause(dropout: float) -> None:
    model = changed()
    model.config.attention_dropout = dropout
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    assert probe(CausalTarget(model)).mode == "tree"
    verdict = probe(CausalTarget(model.train()))
    assert verdict.mode == "refused"
    assert "model.eval()" in verdict.reason


def rounded_by_one_scale(layer: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Round what a layer reads as dynamic quantisation does that knows no tokens."""
    scale = inputs[0].abs().max() / 7
    return (inputs[0] / scale).round() * scale


def test_rounding_with_one_scale_for_all_tokens_is_named_as_a_cause() -> None:
    model = changed()
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(rounded_by_one_scale)
        layer.self_attn.q_proj.register_forward_pre_hook(rounded_by_one_scale)
    verdict = probe(CausalTarget(model))
    assert verdict.mode == "refused"
    assert verdict.reason.startswith("its logits depend on later tokens of the same forward")
    assert not Trial(CausalTarget(build("llama"))).looks_ahead()


def test_an_offloaded_model_is_probed_where_it_runs() -> None:
    model = changed()
    cpu_offload(model, torch.device("cpu"))
    assert model.get_input_embeddings().weight.device.type == "meta"
    target = CausalTarget(model)
    assert target.device.type == "cpu"
    assert probe_target(target) is target


Q_PROJ = "model.layers.0.self_attn.q_proj"


def mixed(states: torch.Tensor) -> torch.Tensor:
    """Return states that depend on all positions of a text, which no mask prevents."""
    return states + states.mean(1)[:, None]


def mix_outputs(layer: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return mixed(out)


def mix_inputs(layer: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (mixed(inputs[0]),)


def patch(mlp: Any) -> None:
    current = mlp.forward
    mlp.forward = lambda states: current(mixed(states))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.model.layers[1].mlp.up_proj.weight.data.fill_(nan), ""),
        (lambda model: model.lm_head.weight.data.fill_(3e38), "its own logits are infinite on "),
        (lambda model: model.set_submodule(Q_PROJ, torch.nn.Linear(7, 7)), "its own forward fails"),
        (lambda model: model.model.layers[0].register_forward_hook(mix_outputs), ""),
        (lambda model: model.model.layers[0].mlp.register_forward_pre_hook(mix_inputs), ""),
        (lambda model: patch(model.model.layers[0].mlp), ""),
    ],
)
def test_a_changed_model_is_refused(change: Any, reason: str) -> None:
    model = changed()
    assert probe(CausalTarget(model)).mode == "tree"
    change(model)
    verdict = probe(CausalTarget(model))
    assert verdict.mode == "refused" and verdict.reason.startswith(reason)


def test_special_tokens_are_not_used() -> None:
    model = changed()
    model.config.image_token_id = 30
    assert 30 in Trial(CausalTarget(build("llama"))).vocabulary
    assert 30 not in Trial(CausalTarget(model)).vocabulary
