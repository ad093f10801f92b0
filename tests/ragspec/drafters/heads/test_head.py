"""Draft heads: fresh weights, saved files, the fingerprint of the target, reduced vocabularies."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragspec.drafters.heads.files import open_head, save_head
from ragspec.drafters.heads.fresh import fresh_head
from ragspec.drafters.heads.head import check_head, target_print
from ragspec.drafters.heads.vocabulary import frequent_tokens
from ragspec.errors import InputError, ModelError, UnsupportedModelError
from ragspec.models.block_linear import BlockLinear
from ragspec.models.checks import CONFIG, WEIGHTS
from ragspec.models.quantized import quantized
from ragspec.training.batches import seeded
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny


def text_target(**options: Any) -> CausalTarget:
    return CausalTarget(heads.model(torch.float32, **options))


def test_a_fresh_head_repeats_the_state_before_its_layer() -> None:
    head = heads.fresh(text_target())
    states = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        read = head.fc(torch.cat([torch.zeros(1, 5, 32), states], -1))
        guessed = head(torch.zeros(1, 5, 32), states).read
    assert (read - states).abs().max() < 0.5 * states.abs().max()
    assert guessed.shape == states.shape


def test_the_generator_alone_decides_on_fresh_weights() -> None:
    target = text_target()
    before = torch.get_rng_state()
    first, again, other = (heads.fresh(target, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_heads_are_saved_in_half_and_quarter_size(tmp_path: Path) -> None:
    head = heads.fresh(text_target())
    kinds: dict[str, Any] = {"whole": None, "half": torch.bfloat16, "quarter": "int8"}
    for name, dtype in kinds.items():
        save_head(head, tmp_path / name, dtype)
    whole, half, small = ((tmp_path / name / WEIGHTS).stat().st_size for name in kinds)
    assert half < 0.6 * whole and small < 0.4 * whole
    opened = open_head(tmp_path / "half")
    assert opened.fc.weight.dtype == torch.float32
    torch.testing.assert_close(opened.fc.weight, head.fc.weight.detach().bfloat16().float())
    read = open_head(tmp_path / "quarter")
    assert torch.equal(read.layers.layers[0].post_attention_layernorm.weight, torch.ones(32))
    before, after = BlockLinear.of(head.fc), BlockLinear.of(read.fc)  # no second rounding
    weight = read.fc.weight.detach()
    assert float((before.weight - weight).abs().max()) < float(before.scales.max())
    assert torch.equal(after.weight, weight)
    save_head(read, tmp_path / "again", "int8")
    again, quarter = (tmp_path / name / WEIGHTS for name in ("again", "quarter"))
    assert again.read_bytes() == quarter.read_bytes()
    save_head(head, tmp_path / "again", "bf16")
    assert again.read_bytes() == (tmp_path / "half" / WEIGHTS).read_bytes()
    for wrong in ("int4", torch.int8, torch.float8_e4m3fn):
        with pytest.raises(InputError, match=r"Expected int8, float64, .* as dtype, got "):
            save_head(head, tmp_path, wrong)


@pytest.mark.parametrize(
    ("file", "content"),
    [(CONFIG, "{"), (CONFIG, "[]"), (CONFIG, '{"kind": "something"}'), (WEIGHTS, "no weights")],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, file: str, content: str) -> None:
    save_head(heads.fresh(text_target()), tmp_path)
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"train it again|Copy it again"):
        open_head(tmp_path)


def test_a_target_keeps_its_print_in_every_dtype() -> None:
    printed = target_print(text_target())
    assert printed == target_print(CausalTarget(heads.model(torch.float64)))
    assert printed == target_print(CausalTarget(heads.model(torch.bfloat16)))
    assert printed != target_print(text_target(seed=1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"has_embedding": True}, r"tables of \d+ tokens, and the target reads \d+ \(cond"),
        ({"markov_rank": 2}, r"tables of \d+ tokens, and the target reads \d+ \(cond"),
        ({"embedding_size": 8}, "embeddings of 8 and gives states of 16; .* have 16 and 16"),
    ],
)
def test_a_head_that_reads_otherwise_is_refused(settings: dict[str, Any], message: str) -> None:
    target = heads.picture_target()
    with pytest.raises(UnsupportedModelError, match=message):
        check_head(replace(heads.fresh(target).config, **settings), target)


def test_a_quantised_target_is_compared_by_sizes() -> None:
    model = quantized(copy.deepcopy(heads.model(torch.float32)))
    check_head(heads.fresh(text_target()).config, CausalTarget(model))


def test_frequent_tokens_come_first_and_low_ids_fill_up() -> None:
    texts = [[9, 9, 9, 7, 7, 5], [7, 9]]
    assert frequent_tokens(texts, 1, 12) == (9,)
    assert frequent_tokens(texts, 2, 12) == (7, 9)
    assert frequent_tokens(texts, 5, 12) == (0, 1, 5, 7, 9)
    assert frequent_tokens(texts, 12, 12) == tuple(range(12))
    assert frequent_tokens([[14, 14, 3]], 2, 12) == (0, 3)  # 14 can only be read
    with pytest.raises(InputError, match="vocabulary of 13 tokens; expected 1 to 12"):
        frequent_tokens(texts, 13, 12)


@pytest.mark.parametrize(
    "mode", ["coupled", "deterministic", "sampled", "sampled-without-replacement"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_stays_exact_and_only_head_tokens_are_drafted(mode: str, temperature: float) -> None:
    model, tokens = tiny.model("llama"), range(0, tiny.VOCAB, 2)
    head = fresh_head(CausalTarget(model), seeded(1, 0, 0), tokens=tokens)
    width = 2 if mode.startswith("sampled") else None
    _, results = heads.check_texts(model, head, temperature, mode=mode, width=width)
    for result in results:
        drafted = {token for step in result.steps for token in step.tree.tokens.tolist()}
        assert drafted and drafted <= set(tokens)


def test_tokens_are_preserved_with_the_head_and_checked(tmp_path: Path) -> None:
    head = fresh_head(text_target(), seeded(1, 0, 0), tokens=[2, 5, 11])
    save_head(head, tmp_path, torch.bfloat16)
    assert {path.name for path in tmp_path.iterdir()} == {CONFIG, WEIGHTS}
    read = open_head(tmp_path, text_target())
    assert read.config == head.config and read.config.target and not read.training
    assert read.tokens is not None
    assert read.tokens.tolist() == [2, 5, 11]
    for wrong in ([5, 2, 11], [2, 2, 11], [2, 5, heads.VOCAB], [-1, 2, 5]):
        weights = load_file(tmp_path / WEIGHTS)
        weights["d2t"] = torch.tensor(wrong) - torch.arange(3)
        weights.pop("t2d", None)
        save_file(weights, tmp_path / WEIGHTS)
        with pytest.raises(ModelError, match="no increasing ids"):
            open_head(tmp_path)
