"""LlamaGen's architecture against a naive computation, its training and its files."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.errors import InputError
from ragspec.visual.models.llamagen import LlamaGenConfig, LlamaGenModel, rotate
from tests.support import image_models


def naive(model: Any, states: torch.Tensor) -> Any:
    """Return logits of embeddings [n, hidden], one query after the other."""
    config = model.config
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    length, side = config.condition_length, config.grid_size

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:
        if position < length:
            return torch.zeros_like(x)
        row, column = divmod(position - length, side)
        speeds = 1e4 ** (-torch.arange(width // 4, dtype=x.dtype) / (width // 4))
        angles = torch.cat([row * speeds, column * speeds])
        even, odd = x[..., 0::2], x[..., 1::2]
        parts = [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()]
        return torch.stack(parts, -1).flatten(-2)

    for layer in model.layers:
        inner = norm(states, layer.attention_norm.weight)
        q, k, v = (inner @ layer.attention.qkv_proj.weight.T).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (heads, width)) for each in (q, k, v))
        out = torch.zeros_like(q)
        for i in range(len(states)):
            keys = torch.stack([turn(k[j], j) for j in range(i + 1)])
            scores = torch.einsum("hd,jhd->hj", turn(q[i], i), keys) * width**-0.5
            out[i] = torch.einsum("hj,jhd->hd", scores.softmax(-1), v[: i + 1])
        states = states + out.flatten(1) @ layer.attention.o_proj.weight.T
        inner = norm(states, layer.ffn_norm.weight)
        gate, up = (inner @ layer.feed_forward.gate_up_proj.weight.T).chunk(2, -1)
        fed = gate * gate.sigmoid() * up
        states = states + fed @ layer.feed_forward.down_proj.weight.T
    return norm(states, model.norm.weight) @ model.lm_head.weight.T


@pytest.mark.parametrize("condition", ["class", "features"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_it_computes_what_a_naive_prefill_computes(condition: str, implementation: str) -> None:
    model = copy.deepcopy(image_models.model(condition))
    model.set_attn_implementation(implementation)
    ids = torch.randint(image_models.BOOK, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        first = model.condition(image_models.condition_inputs(model))
        result = model(ids, condition_embeds=first).logits
        for row in range(3):
            states = torch.cat([first[row], model.embed_tokens(ids[row])])
            # Transformers' eager attention takes its softmax in float32.
            loose = 1e-5 if implementation == "eager" else 1e-10
            torch.testing.assert_close(result[row], naive(model, states), rtol=loose, atol=loose)


def test_codes_of_half_precision_are_turned_in_float32() -> None:
    model = image_models.model()
    width = model.config.hidden_size // model.config.num_attention_heads
    states = torch.randn(1, 16, 2, width).bfloat16()
    rotation = model.rotation(torch.arange(16)[None], torch.bfloat16)
    assert rotation.dtype == torch.complex64
    expected = rotate(states.float(), rotation).bfloat16()
    assert torch.equal(rotate(states, rotation), expected)


def test_training_moves_every_weight() -> None:
    for condition in ("class", "features"):
        model = copy.deepcopy(image_models.model(condition)).train()
        inputs = image_models.condition_inputs(model)
        ids = torch.randint(image_models.BOOK, (3, 16))
        first = torch.cat([model.condition(inputs[:2]), model.unconditional(1)])
        logits = model(ids[:, :-1], condition_embeds=first).logits
        logits = logits[:, model.config.condition_length - 1 :]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()  # type: ignore[no-untyped-call]
        for name, weight in model.named_parameters():
            assert weight.grad is not None and weight.grad.any(), name


def test_dropout_is_for_training_only() -> None:
    sizes = image_models.model().config.to_dict()
    model = LlamaGenModel(LlamaGenConfig(**sizes | {"dropout": 0.5})).eval()
    ids = torch.arange(6)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("condition", ["class", "features"])
def test_a_saved_model_computes_the_same_logits(condition: str, tmp_path: Path) -> None:
    model = copy.deepcopy(image_models.model(condition)).float()
    model.save_pretrained(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors"}
    again = LlamaGenModel.from_pretrained(tmp_path)
    before, after = model.config.to_dict(), again.config.to_dict()
    assert before | {"_name_or_path": str(tmp_path)} == after
    inputs = image_models.condition_inputs(model)
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    ids = torch.arange(8).repeat(3, 1)
    with torch.no_grad():
        results = [m(ids, condition_embeds=m.condition(inputs)).logits for m in (model, again)]
    assert torch.equal(*results)
    half = LlamaGenModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(ids).logits.dtype == torch.bfloat16


def test_sizes_follow_the_paper() -> None:
    config = LlamaGenConfig()
    assert (config.intermediate_size, config.max_position_embeddings) == (2048, 257)
    assert LlamaGenConfig(hidden_size=1280, num_attention_heads=20).intermediate_size == 3584
    assert LlamaGenConfig(condition="features", condition_length=120).max_position_embeddings == 376


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 30, "num_attention_heads": 4}, "multiple of 4"),
        ({"hidden_size": 24, "num_attention_heads": 4}, "multiple of 4"),
        ({"condition": "text"}, "'class' or 'features'"),
        ({"condition_length": 3}, "condition_length 3"),
    ],
)
def test_bad_sizes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LlamaGenConfig(**settings)


@pytest.mark.parametrize(
    "inputs", [torch.tensor([4]), torch.tensor([-1]), torch.tensor([1.0]), torch.tensor([[1]])]
)
def test_classes_out_of_range_are_refused(inputs: torch.Tensor) -> None:
    with pytest.raises(InputError, match="from 0 to 2, or 3 for no class"):
        image_models.model().condition(inputs)


@pytest.mark.parametrize("shape", [(1, 2, 6), (1, 3, 5), (3, 6)])
def test_captions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"floats \[B, 3, 6\]"):
        image_models.model("features").condition(torch.zeros(shape))
