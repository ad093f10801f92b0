"""Weights in blocks of 8 or 4 bits: what is stored, and texts that are exact for it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ragspec import Engine, load_model
from ragspec.errors import MissingExtraError, ModelError
from ragspec.models import onnx_session
from ragspec.models import quantized as module
from ragspec.models.block_linear import (
    BLOCK,
    BlockEmbedding,
    BlockLinear,
    count_weights,
    weights_of,
)
from ragspec.models.quantized import WIDE, quantized, replace_linears
from tests.support import tiny
from tests.support.architectures import ARCHITECTURES, make

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")


def linear(n: int = 48, k: int = 96, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=bias)


def test_weights_of_q8_0_are_stored_exactly() -> None:
    layer = linear()
    whole = torch.randint(-127, 128, (48, 3, BLOCK))
    whole[:, :, 5] = 127  # llama.cpp makes the largest of a block 127 or -127
    scales = torch.rand(48, 3).half().float() + 0.01
    scales[7, 1] = 0.0
    layer.weight.data = (whole * scales[..., None]).flatten(1)
    block = BlockLinear.of(layer)
    assert torch.equal(block.weight, layer.weight)
    kept = scales > 0
    assert torch.equal(block.codes[kept].long() - 128, whole[kept])


FACTORS = 2.0 ** torch.randint(-3, 4, (192,), generator=torch.Generator().manual_seed(0))
STORED = [(32, BLOCK, None), (96, BLOCK, None), (192, WIDE, None), (192, WIDE, FACTORS)]


@pytest.mark.parametrize(("k", "size", "factors"), STORED)
def test_rounding_errors_are_at_most_half_a_step(k: int, size: int, factors: Any) -> None:
    layer = linear(k=k)
    layer.weight.data[3, :32] = layer.weight.data[3, :32].abs()  # of one sign
    block = BlockLinear.of(layer, size, factors).requires_grad_(False)
    off = (block.weight - layer.weight.detach()) / (1.0 if factors is None else factors)
    assert float((off.reshape(48, -1, size).abs().amax(-1) / block.scales).max()) <= 0.5 + 1e-3
    rows = torch.tensor([[3, 0], [47, 3]])
    assert torch.equal(BlockEmbedding(block)(rows), block.weight[rows])


SMALL = [(96, BLOCK, None, torch.ones(96)), (192, BLOCK, FACTORS, torch.rand(192))]


@pytest.mark.parametrize(("k", "size", "factors", "sizes"), [*((*x, None) for x in STORED), *SMALL])
def test_products_are_those_of_the_stored_weights(
    k: int, size: int, factors: Any, sizes: Any
) -> None:
    layer, evened = linear(k=k, bias=True), torch.randn(2, 5, k)
    x = evened if factors is None else evened / factors
    layer.weight.data *= 1.0 if factors is None else factors
    block = BlockLinear.of(layer, size, factors, sizes).requires_grad_(False)
    out = block(x)
    for place in (slice(1), slice(2, 4)):  # a row has its bits in every width
        assert torch.equal(block(x[:, place]), out[:, place])
    torch.testing.assert_close(block.padded()(functional.pad(evened, (0, -k % 128))), out)
    for _ in range(2):
        expected = functional.linear(x, block.weight, block.bias)
        torch.testing.assert_close(block(x), expected, rtol=0, atol=0.03 * float(out.std()))
        block.codes.add_(1)  # the changed weights are seen


def test_4_bits_store_a_grid_exactly_and_err_least_where_inputs_are_large() -> None:
    layer, large = linear(), torch.ones(96)
    large[::BLOCK] = 1e4
    off = [
        (BlockLinear.of(layer, sizes=each).weight - layer.weight)[:, ::BLOCK].square().sum()
        for each in (large, torch.ones(96))
    ]
    assert off[0] < 0.2 * off[1]
    whole, zeros = torch.randint(16, (48, 3, BLOCK)), torch.randint(16, (48, 3, 1))
    whole[..., 4], whole[..., 9] = 0, 15
    layer.weight.data = ((whole - zeros) * (torch.rand(48, 3, 1) + 0.01)).flatten(1)
    torch.testing.assert_close(BlockLinear.of(layer, sizes=large).weight, layer.weight)


def uneven() -> Any:
    """Return a model of which one channel is large in the inputs of all layers."""
    model = copy.deepcopy(tiny.model("llama"))
    for layer in model.model.layers:
        layer.input_layernorm.weight.data[5] = 300.0
        layer.post_attention_layernorm.weight.data[5] = 300.0
    return model


def errors_of(model: Any, *stored: Any) -> list[float]:
    """Return how far the logits of other models are from those of a model, on average."""
    ids = torch.tensor([tiny.prompt(60)])
    return [float((each(ids).logits - model(ids).logits).detach().abs().mean()) for each in stored]


def test_int4_stores_all_layers_but_the_head_in_4_bits() -> None:
    model = uneven()
    stored, plain = quantized(copy.deepcopy(model), "int4"), copy.deepcopy(model)
    replace_linears(plain, lambda x: BlockLinear.of(x, sizes=torch.ones(x.in_features)))
    blocks = {n: block for n, block in stored.named_modules() if isinstance(block, BlockLinear)}
    assert {n: block.bits for n, block in blocks.items() if block.bits != 4} == {"lm_head": 8}
    assert weights_of(stored) == "int4" and count_weights(stored) >= model.num_parameters()
    assert all(x.factors is not None and x.factors.std() > 0 for x in blocks.values())
    off, usual = errors_of(model, stored, plain)
    assert off < 0.6 * usual, (off, usual)


def test_int4_stores_layers_that_get_no_inputs() -> None:
    model = copy.deepcopy(tiny.model("llama"))
    model.idle = idle = linear(k=64)
    model.model.norm.register_forward_pre_hook(lambda *_: (idle(torch.zeros(0, 64)), None)[1])
    stored = quantized(model, "int4").idle
    assert (stored.weight - idle.weight).square().mean() < 0.02 * idle.weight.square().mean()


def test_inputs_of_norms_are_evened_out_and_q8_0_is_taken_over() -> None:
    model = uneven()
    stored, plain = quantized(copy.deepcopy(model)), copy.deepcopy(model)
    replace_linears(plain)
    off, usual = errors_of(model, stored, plain)
    assert off < 0.5 * usual, (off, usual)
    blocks = {n: block for n, block in plain.named_modules() if isinstance(block, BlockLinear)}
    for name, block in blocks.items():
        if "k_proj" not in name:  # the layers beside it read the same norm
            model.get_submodule(name).weight.data = block.weight.detach()
    again = quantized(model)
    for name, block in blocks.items():
        same = torch.equal(again.get_submodule(name).weight, block.weight)
        assert same == ("k_proj" not in name)


def test_products_use_the_current_scales_and_codes() -> None:
    block, x = BlockLinear.of(linear()).requires_grad_(False), torch.randn(3, 96)
    expected = block(x)
    for name in ("codes", "scales"):
        setattr(block, name, nn.Parameter(getattr(block, name).flip(0), requires_grad=False))
    assert torch.equal(block(x), expected.flip(1))
    with torch.no_grad():
        block.scales.mul_(4.0)
    assert torch.equal(block(x), expected.flip(1) * 4.0)


def test_a_channel_that_is_dead_stays_dead() -> None:
    model, ids = copy.deepcopy(tiny.model("llama")), torch.tensor([tiny.prompt()])
    attention = model.model.layers[0].self_attn
    model.model.layers[0].input_layernorm.weight.data[3] = 0.0
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        linear.weight.data[:, 3] = 0.0
    assert quantized(model)(ids).logits.isfinite().all()


def test_quantizing_changes_neither_mode_nor_random_state() -> None:
    model = tiny.model("gpt2", n_positions=32, attn_pdrop=0.5, resid_pdrop=0.5).train()
    model.transformer.h[0].eval()
    state, again = torch.get_rng_state(), copy.deepcopy(model)
    with torch.device("meta"):
        first = quantized(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.training and not first.transformer.h[0].training
    for name, weight in quantized(again).named_parameters():
        assert torch.equal(weight, first.get_parameter(name))


@pytest.mark.parametrize("architecture", ["qwen3_next", "olmo_hybrid"])
def test_norms_of_heads_are_no_inputs_of_layers(architecture: str) -> None:
    settings = dict(ARCHITECTURES[architecture].settings)
    settings |= {"hidden_size": 128, "intermediate_size": 192, "linear_value_head_dim": 32}
    settings |= {"linear_key_head_dim": 32, "moe_intermediate_size": 64}
    settings |= {"shared_expert_intermediate_size": 64, "head_dim": 32}
    model = make(architecture, torch.float32, 0, **settings)
    stored, ids = quantized(copy.deepcopy(model)), torch.tensor([tiny.prompt()])
    expected = model(ids).logits
    assert (stored(ids).logits - expected).abs().mean() < 0.1 * expected.std()


def test_a_model_whose_forward_needs_other_inputs_gets_small_blocks() -> None:
    model = copy.deepcopy(tiny.model("llama"))
    forward = model.forward
    model.forward = lambda *, wanted, **inputs: forward(**inputs)
    blocks = [each for each in quantized(model).modules() if isinstance(each, BlockLinear)]
    assert blocks and all(block.codes.shape[2] == BLOCK for block in blocks)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_drafted_texts_are_those_of_plain_decoding(family: str) -> None:
    model = quantized(copy.deepcopy(tiny.model(family)))
    prompt = tiny.prompt(20)
    plain = Engine(model, None, None).generate(prompt, max_new_tokens=20)
    drafted = Engine(model, None, "lookup", budget=4).generate(prompt, max_new_tokens=20)
    assert drafted.tokens == plain.tokens
    assert drafted.label == "exact up to rounding"  # through the modules: too small for a graph


def test_auto_quantizes_large_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy.deepcopy(tiny.model("llama")).save_pretrained(tmp_path)
    small = Engine.from_pretrained(tmp_path, device="cpu").model
    monkeypatch.setattr(module, "LEAST", 1000)

    def kind(**options: Any) -> type:
        options = {"device": "cpu", **options}
        return type(Engine.from_pretrained(tmp_path, **options).model.lm_head)

    assert type(small.lm_head) is nn.Linear
    assert kind() is BlockLinear
    for options in ({"dtype": "float32"}, {"runtime": "torch"}):
        assert kind(**options) is nn.Linear
    assert type(load_model(tmp_path, "cpu")[0].lm_head) is nn.Linear
    tiny.model("llama", hidden_act="gelu").save_pretrained(tmp_path / "gelu")
    foreign = Engine.from_pretrained(tmp_path / "gelu", device="cpu")
    assert type(foreign.model.lm_head) is nn.Linear, "no graph runs it"
    monkeypatch.setattr(onnx_session, "find_spec", lambda name: None)
    assert kind() is nn.Linear
    with pytest.raises(MissingExtraError, match=r"ragspec\[onnx\]"):
        load_model(tmp_path, "cpu", "int8")


def test_models_that_cannot_be_quantized_are_refused() -> None:
    with pytest.raises(ModelError, match=r"of 32, got model.layers.0.*q_proj with 24\."):
        quantized(copy.deepcopy(tiny.model("llama", hidden_size=24, intermediate_size=40)))
    twice = quantized(copy.deepcopy(tiny.model("llama")))
    with pytest.raises(ModelError, match="expected floating weights"):
        quantized(twice)
    with pytest.raises(ModelError, match=r"got none of these\. Leave dtype='int4' out"):
        quantized(copy.deepcopy(tiny.model("gpt2")), "int4")  # has no linear layer but its head
    with pytest.raises(ModelError, match="got dtype='int8' on meta"):
        quantized(copy.deepcopy(tiny.model("llama")).to("meta"))
