"""Published layouts of draft heads are read, compute what published code does, and draft."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ragspec import Engine
from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.drafters.heads.files import holds_head, open_head, save_head
from ragspec.errors import InputError, MissingModelError, ModelError, UnsupportedModelError
from ragspec.models.checks import INDEX, PICKLED, WEIGHTS
from ragspec.models.quantized import quantized
from ragspec.training.batches import StateRead
from ragspec.training.loss import rounds
from ragspec.trees.operations import depths
from ragspec.verification.causal import CausalTarget
from tests.ragspec.drafters.heads import test_slots
from tests.support import heads, published_heads, tiny
from tests.support.published_heads import DRAFTED, IDS, INPUTS, TOKENS, Checkpoint, H, V, spread

LAYOUTS: dict[str, Callable[[], Checkpoint]] = {
    "eagle1 with a bias": partial(published_heads.eagle1, True),
    "eagle1": partial(published_heads.eagle1, False),
    "eagle3": published_heads.eagle3,
    "speculators": published_heads.speculators,
    "eagle3.1": published_heads.eagle31,
    "speculators 3.1": partial(published_heads.speculators, "qwen3", **published_heads.NORMS),
    "speculators, each tap normed": partial(published_heads.speculators, fc_norm=True),
}
RECORDED = test_slots.table("""\
eagle1 with a bias: 2.747 1.6999 -5.9672 5.0657 -7.3739 -4.2994
eagle1: 2.3029 1.8439 -5.119 4.8799 -6.0431 -4.0186
eagle3: 0.1234 -0.0487 -0.2439 -0.1441 -0.0588 0.0819
speculators: 0.1234 -0.0487 -0.2439 -0.1441 -0.0588 0.0819
speculators: 0.029 0.0514 0.1067 0.1459 0.0863 0.1603
speculators: 0.0902 -0.3234 0.0966 0.0352 -0.0838 0.1807
speculators 3.1: 0.0108 -0.3234 -1.0108 -1.0321 0.0253 0.0574
speculators 3.1: -1.1261 1.1791 1.4534 1.088 0.0358 -0.5186
speculators 3.1: -0.1432 -1.2978 0.1027 0.7184 -1.1472 0.2501
speculators, each tap normed: 0.1254 -0.0343 -0.1881 -0.1036 -0.0714 0.0671
speculators, each tap normed: 0.0589 0.0146 0.0559 0.0873 0.0564 0.1589
speculators, each tap normed: 0.1023 -0.2677 0.0891 0.0307 -0.089 0.1685""")
RECORDED["eagle3.1"] = RECORDED["speculators 3.1"]


def target(**options: Any) -> CausalTarget:
    return CausalTarget(tiny.model("llama", **options))


@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_compute_what_published_code_does(name: str, tmp_path: Path) -> None:
    """In every round of drafting: round k reads k predicted states."""
    head = open_head(published_heads.write(tmp_path, *LAYOUTS[name]()), target())
    third, expected = "eagle1" not in name, RECORDED[name]
    pad = torch.nn.functional.pad
    embedded = pad(INPUTS["embeddings"][IDS], (0, 0, 1, 0))
    taps = pad(INPUTS["taps" if third else "state"], (0, 0, 0, 1))
    read = StateRead(embedded, torch.zeros(1, 9, H), taps, torch.ones(1, 9, dtype=torch.bool))
    with torch.no_grad():
        for k, guessed in enumerate(rounds(head, read, 0.0, len(expected))):
            outputs = guessed.fed if head.output is None else head.output(guessed.read)
            assert spread(outputs[:, k:]) == pytest.approx(expected[k], abs=2e-4)


SAVED = LAYOUTS | test_slots.LAYOUTS
SAVED["medusa below the last layer"] = partial(published_heads.medusa, hidden_state_offset=1)


@pytest.mark.parametrize("name", SAVED)
def test_a_head_that_is_saved_again_is_the_same(name: str, tmp_path: Path) -> None:
    head = open_head(published_heads.write(tmp_path / "first", *SAVED[name]()), target())
    save_head(head, tmp_path / "second")
    assert holds_head(tmp_path / "second")
    assert len({path.stat().st_mode for path in (tmp_path / "second").iterdir()}) == 1
    again = open_head(tmp_path / "second", target())
    assert again.config == head.config
    assert again.state_dict().keys() == head.state_dict().keys()
    for weight, other in head.state_dict().items():
        assert torch.equal(again.state_dict()[weight], other)
    if name not in LAYOUTS:
        return
    parts = ("lm_head", "embed_tokens")
    saved = {part for part in parts if f"{part}.weight" in load_file(tmp_path / "second" / WEIGHTS)}
    assert saved == {part for part in parts if f"{part}.weight" in SAVED[name]()[1]}
    inputs = INPUTS["embeddings"][IDS], head.project(INPUTS["taps" if head.output else "state"])
    assert torch.equal(again(*inputs).read, head(*inputs).read)
    written = json.loads((tmp_path / "second" / "config.json").read_text(encoding="utf-8"))
    assert ("speculators_model_type" in written) is (head.output is not None)


@pytest.mark.parametrize(("temperature", "weights"), [(0.0, None), (1.0, None), (1.0, "int8")])
@pytest.mark.parametrize("name", SAVED)
def test_texts_stay_as_they_are(
    name: str, temperature: float, weights: str | None, tmp_path: Path
) -> None:
    model = copy.deepcopy(target().model)
    model.get_input_embeddings().weight.data = INPUTS["embeddings"]
    model = model if weights is None else quantized(model)
    published_heads.write(tmp_path, *SAVED[name]())
    drafter, results = heads.check_texts(model, tmp_path, temperature)
    if name not in LAYOUTS:
        trees = [step.tree for each in results for step in each.steps[1:4]]
        deepest = max(int(depths(tree.parents).max()) for tree in trees)
        assert all(len(tree) for tree in trees) and deepest <= drafter.head.config.slots
        assert weights is None or deepest == drafter.head.config.slots  # chains
    for result in results:
        drafted = {token for step in result.steps for token in step.tree.tokens.tolist()}
        assert drafted
        assert drafter.head.tokens is None or drafted <= set(TOKENS.tolist())


def test_taps_of_the_file_decide_the_states_that_a_head_reads(tmp_path: Path) -> None:
    """Drafts follow the inputs of the named layers: other taps, other drafts."""
    model, prompt = target(num_hidden_layers=6).model, tiny.prompt(24)
    config, weights = published_heads.speculators()
    trees = []
    for taps in ([2, 3, 3], [2, 3, 3], [0, 5, 6]):
        folder = published_heads.write(
            tmp_path, config | {"eagle_aux_hidden_state_layer_ids": taps}, weights
        )
        drafter = HeadDrafter(open_head(folder, CausalTarget(model)), model, depth=4)
        result = Engine(model, drafter=drafter, budget=6).generate(prompt, max_new_tokens=8)
        trees.append([step.tree.tokens.tolist() for step in result.steps])
    assert trees[0] == trees[1] != trees[2]
    published_heads.write(tmp_path, *published_heads.eagle3())
    assert open_head(tmp_path, CausalTarget(model)).config.taps == (2, 3, 3)
    with pytest.raises(ModelError, match="names no taps"):
        open_head(tmp_path)
    config, weights = published_heads.eagle3()
    outputs = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    published_heads.write(tmp_path, config | outputs, weights)
    assert open_head(tmp_path).config.taps == (2, 3, 5)
    far = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}}  # inputs, as of Kimi
    published_heads.write(tmp_path, config | far, weights)
    with pytest.raises(UnsupportedModelError, match=r"input of layer 9; got .* with 6 layers"):
        HeadDrafter(tmp_path, model)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_are_read_without_running_code(zipped: bool, tmp_path: Path) -> None:
    config, weights = published_heads.eagle3()
    folder = published_heads.write(tmp_path / "safe", config, weights)
    pickled = published_heads.write(tmp_path / "pickled", config, weights)
    (pickled / "model.safetensors").unlink()
    save = partial(torch.save, f=pickled / PICKLED[0], _use_new_zipfile_serialization=zipped)
    save(weights)
    first, second = (open_head(each, target()).state_dict() for each in (folder, pickled))
    assert all(torch.equal(second[name], each) for name, each in first.items())
    for values in ({**weights, "norm.weight": copy.deepcopy}, {**weights, "n": 3}, {3: IDS}, [IDS]):
        save(values)
        with pytest.raises(ModelError, match=r"bin .*( run code| by their names)\)"):
            open_head(pickled, target())


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no weight_map in it"),
        ({"weight_map": ["x"]}, r"\['x'\], no object"),
        ({"weight_map": {"x": 3}}, "names 3 for x, no file beside it"),
        ({"weight_map": {"x": "../head/a.safetensors"}}, "a.safetensors' for x, no file beside it"),
        ({"weight_map": {"midlayer.x": "a.safetensors"}}, "a.safetensors has no tensor midlayer.x"),
    ],
)
def test_a_wrong_index_is_refused(index: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = published_heads.write(tmp_path / "head", *published_heads.eagle3())
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        open_head(folder, target())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("eagle3", {"strange.weight": torch.zeros(3)}, "strange.weight"),
        ("eagle3", {"norm.weight": None}, "norm.weight"),
        ("eagle3", {"fc.weight": torch.zeros(H, 2 * H)}, "fc.weight|divides|taps"),
        ("eagle3", {"midlayer.self_attn.q_proj.weight": torch.zeros(H, H)}, "q_proj"),
        ("eagle3", {"t2d": torch.ones(V, dtype=torch.bool)}, "t2d marks other tokens"),
        ("eagle3", {"d2t": torch.zeros(DRAFTED, dtype=torch.int64) - 1}, "no increasing ids"),
        ("eagle3", {"fc.weight": torch.zeros(H).to(torch.float8_e4m3fn)}, "quantised weights"),
        ("eagle3", {"fc.weight": torch.zeros(H, 3 * H, dtype=torch.int8)}, "quantised weights"),
        ("eagle3", {"fc.qzeros": torch.zeros(3)}, r"quantised weights \(fc\.qzeros\)"),
        ("eagle3", {"d2t": torch.zeros(0).long()}, r"d2t has shape \[0\], no list"),
        ("eagle3", {"d2t": torch.zeros(3, 2).long()}, r"d2t has shape \[3, 2\], no list"),
        ("eagle3", {"d2t": None}, "40 rows of logits, 97 tokens, no d2t"),
        ("eagle3", {"hidden_size": 32}, "size mismatch|hidden size"),
        ("eagle3", {"hidden_size": "wide"}, "hidden_size"),
        ("eagle3", {"vocab_size": 96}, "no increasing ids|96 tokens|t2d"),
        ("eagle3", {"num_attention_heads": 7}, "divides"),
        ("eagle3", {"num_attention_heads": 0}, "num_attention_heads=0"),
        ("eagle3", {"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ("eagle3", {"head_dim": "wide"}, "head_dim='wide'"),
        ("eagle3", {"rope_parameters": [1]}, "rope_parameters"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0.5, 1, 2]}, r"layer_ids are \[0\.5"),
        ("dflash", {"aux_hidden_state_layer_ids": ["1", "2"]}, r"layer_ids are \['1'"),
        ("eagle3", {"norm.weight": torch.full((H,), torch.nan)}, r"norm\.weight.* than finite"),
        ("eagle3", {"norm.weight": torch.ones(H, dtype=torch.int32)}, r"norm\.weight of .*int32"),
        ("medusa", {"0.0.linear.bias": torch.ones(H, dtype=torch.cfloat)}, "bias of .*complex64"),
        ("eagle3", {"d2t": torch.zeros(DRAFTED)}, "d2t of .*float32 .* than whole"),
        ("eagle3", {"fc.weight": None}, "fc.weight"),
        ("eagle3", {"num_attention_heads": 2.0}, r"num_attention_heads=2\.0"),
        ("eagle3", {"hidden_size": -1}, "hidden_size=-1"),
        ("eagle3", {"ragspec": {"target": 7}}, "its fingerprint as text"),
        ("peagle", {"mask_token_id": None}, "mask token None for 3 slots"),
        ("dflash", {"block_size": "4"}, "block_size is '4'"),
        ("dflash", {"block_size": 1}, "slots=0"),
        ("dflash", {"mask_token_id": 4000}, "mask token 4000"),
        ("dspark", {"markov_head_type": "gated"}, "Markov head of type 'gated'"),
        ("dflash of z-lab", {"vocab_size": 96}, "and 96 tokens, this one has"),
        (
            "dflash",
            {"aux_hidden_state_layer_ids": [1, 9]},
            "input of layer 9; got .* with 2 layers",
        ),
        ("hydra++", {"more": torch.zeros(2)}, "more"),
        ("medusa", {"3.0.linear.weight": torch.zeros(H, H)}, "linear"),
        ("medusa", {"1.1.weight": None}, "blocks.2|size|slots"),
        ("eagle1 with a bias", {"fc.bias": None}, "fc.bias"),
        ("eagle3", {"num_hidden_layers": 10**9}, r"layers is 1000000000, with 14 tensors\)"),
        ("eagle3", {"num_hidden_layers": 13}, r"Missing key.* \[\.\.\.\]\); fetch"),
        ("eagle3", {"intermediate_size": 10**9}, r"size mismatch for .*gate_proj.* 64\]"),
        ("eagle3", {"eagle_config": [3]}, r"its eagle_config is \[3\], no object"),
        ("eagle3", {"norm_before_fc": True}, "tap_norms.0.weight"),
        ("dflash of z-lab", {"is_causal": True}, "causal attention in layers without a window"),
        ("speculators", {"speculators_model_type": []}, r"of kind \[\]; expected one of"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": -1}, "ids is -1, no list"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}, "of at least 0"),
        ("dflash", {"aux_hidden_state_layer_ids": None}, "layer_ids are missing"),
        ("dflash of z-lab", {"dflash_config": {"target_layer_ids": ["3"]}}, "of at least -1"),
        ("peagle", {"speculators_config": {}}, "speculative_tokens is None"),
    ],
)
def test_errors_name_the_wrong_tensor_or_setting(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, weights = SAVED[name]()
    for key, value in change.items():
        (weights if key in weights or torch.is_tensor(value) else config)[key] = value
    weights = {key: each for key, each in weights.items() if each is not None}
    with pytest.raises((ModelError, UnsupportedModelError), match=message):
        open_head(published_heads.write(tmp_path, config, weights), target())


def test_folders_without_a_fitting_head_are_refused(tmp_path: Path) -> None:
    (tmp_path / "training.pt").touch()
    with pytest.raises(MissingModelError, match=r"no draft head; .*bin.*, got training\.pt\. "):
        open_head(tmp_path, target())
    config, weights = published_heads.speculators()
    folder = published_heads.write(tmp_path, config | {"speculators_model_type": "dream"}, weights)
    with pytest.raises(UnsupportedModelError, match="of kind 'dream'; expected one of '"):
        open_head(folder, target())
    published_heads.write(tmp_path, {"model_type": "llama"}, {"x.weight": torch.zeros(2)})
    (folder / WEIGHTS).rename(folder / "medusa_lm_head.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"tensors such as x\.weight; expected a head"):
        open_head(folder, target())
    assert not holds_head(folder)
    published_heads.write(tmp_path, *published_heads.eagle1(False))
    with pytest.raises(UnsupportedModelError, match="hidden size 64 and 97 tokens, this"):
        open_head(folder, target(hidden_size=48))
    with pytest.raises((InputError, UnsupportedModelError), match="97 tokens, this one has"):
        open_head(folder, target(vocab_size=50))


def test_embeddings_of_its_own_are_read(tmp_path: Path) -> None:
    config, weights = published_heads.speculators()
    folder = published_heads.write(tmp_path, config, weights)
    head, ids = open_head(folder, target()), torch.tensor([[3, 5]])
    torch.testing.assert_close(head.embed(target(), ids), weights["embed_tokens.weight"][ids])
    published_heads.write(folder, config, weights | {"t2d": weights["t2d"].byte()})
    assert open_head(folder, target()).config == head.config
    published_heads.write(folder, *published_heads.eagle3())
    assert torch.equal(open_head(folder, target()).embed(target(), ids), target().embed(ids))


@pytest.mark.parametrize("kind", [None, "gated"])
def test_a_dspark_without_a_markov_head_is_read(kind: str | None, tmp_path: Path) -> None:
    config, weights = published_heads.dflash("dspark", markov_head_type=kind, markov_rank=0)
    weights = {name: each for name, each in weights.items() if "markov" not in name}
    head = open_head(published_heads.write(tmp_path, config, weights), target())
    assert head.config.markov_rank == 0
