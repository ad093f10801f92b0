"""Published heads that draft several tokens in one pass compute what published code does."""

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.drafters.heads.cache import HeadModel, SlotCache
from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.drafters.heads.files import open_head, save_head
from ragspec.drafters.heads.fresh import fresh_head
from ragspec.drafters.heads.head import DraftHead
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.training.batches import StateRead
from ragspec.training.loss import Teacher, head_output, rounds
from ragspec.training.trainer import HeadTrainer, HeadTraining, TrainingProgress
from ragspec.trees.draft_tree import ROOT
from ragspec.trees.operations import depths
from ragspec.verification.batch import Batch, TreeView
from ragspec.verification.causal import CausalTarget
from ragspec.verification.sequence_cache import SequenceCache
from ragspec.verification.tree_attention import tree_view
from tests.support import heads, published_heads, tiny
from tests.support.published_heads import IDS, INPUTS, H, spread


def table(text: str) -> dict[str, list[list[float]]]:
    """Return rows of numbers by the name before them."""
    rows = defaultdict[str, list[list[float]]](list)
    for line in text.split("\n"):
        name, _, numbers = line.partition(": ")
        rows[name].append([float(each) for each in numbers.split()])
    return dict(rows)


LAYOUTS: dict[str, Callable[[], Any]] = {
    "peagle": published_heads.peagle,
    "dflash": partial(published_heads.dflash, "dflash"),
    "dflash, both ways in windows": partial(
        published_heads.dflash, "dflash", sliding_window_non_causal=True
    ),
    "dspark": partial(published_heads.dflash, "dspark"),
    "dflash of z-lab": published_heads.zlab,  # its states: the rows of logits are the target's
    "medusa": published_heads.medusa,
    "hydra": partial(published_heads.hydra, False),
    "hydra++": partial(published_heads.hydra, True),
}
RECORDED = table("""\
peagle: 0.1889 -0.1252 -0.2371 0.0338 0.2501 0.0626
peagle: 0.8469 -0.1536 -0.906 -0.1955 0.8307 0.5155
peagle: 0.027 0.9295 0.3311 -0.802 -0.6401 0.5554
dflash: 1.3275 0.1938 -1.2529 -0.6765 0.9923 1.0587
dflash: 1.1922 0.3917 -1.0413 -0.7929 0.7359 1.0764
dflash: 1.1528 0.4611 -0.9752 -0.8368 0.6528 1.0883
dflash, both ways in windows: 1.343 0.1728 -1.2764 -0.6645 1.0204 1.0576
dflash, both ways in windows: 1.2 0.3839 -1.0521 -0.7892 0.7481 1.0774
dflash, both ways in windows: 1.1528 0.4611 -0.9752 -0.8368 0.6528 1.0883
dspark: -2.1424 -3.6562 -2.8713 -1.1264 -1.2938 -3.1409
dspark: 1.4994 0.5627 -0.6887 0.0805 1.9385 2.19
dspark: 0.5158 -0.0644 -1.275 -0.8031 0.9492 1.5122
dspark: 3.2366 2.3365 0.6835 0.5976 1.8565 2.0558
dflash of z-lab: -0.2426 0.595 -0.4971 0.469 -0.5845 0.4447
medusa: -2.0569 -1.0958 0.1516 1.3595 2.2121 2.4868
medusa: 2.7241 4.4363 4.9893 4.2389 2.381 -0.099
medusa: 7.4347 8.0106 6.4937 3.2802 -0.7903 -4.6543
hydra: -2.1451 -1.5807 -0.3713 1.1107 2.1416 2.3722
hydra: -1.4257 -1.2573 -0.5284 0.5141 1.2615 1.4384
hydra: -0.4054 -0.9108 -0.9462 -0.5589 -0.1864 -0.0059
hydra++: -1.9326 -2.1199 -1.5212 -0.3497 0.7525 1.4172
hydra++: -1.388 -1.5395 -1.0567 -0.1224 0.6831 1.0693
hydra++: -1.7273 -1.71 -1.0139 0.1226 1.0662 1.4905""")
PATH = (int(IDS[0, -1]), 17, 44, 3)  # tokens after the slots, the root first


def target(dtype: torch.dtype = torch.float32) -> CausalTarget:
    """Return a target with the embeddings of the published heads."""
    model = copy.deepcopy(tiny.model("llama")).to(dtype)
    model.get_input_embeddings().weight.data = INPUTS["embeddings"].to(dtype)
    return CausalTarget(model)


def opened(name: str, folder: Path, target: CausalTarget) -> DraftHead:
    return open_head(published_heads.write(folder, *LAYOUTS[name]()), target)


@pytest.mark.parametrize("name", LAYOUTS)
def test_slots_are_those_of_published_code(name: str, tmp_path: Path) -> None:
    model, expected = target(), RECORDED[name]
    head = opened(name, tmp_path, model)
    masks, count = head.config.masks, len(head.config.taps)
    places = torch.arange(8 + masks)[None]
    batch = Batch([SequenceCache(32)], [TreeView(0, places, places, None)])
    embedded = INPUTS["embeddings"][torch.cat([IDS, torch.full((1, masks), 5)], 1)]
    taps = INPUTS["state"] if count == 1 else INPUTS["taps"][..., : count * H]
    with tree_view(batch), torch.no_grad():
        read, fed = head.read(embedded, head.project(taps), batch)
        rows = head.rows(model)
        if rows is None:
            after = read
        else:
            paths = [PATH[: length + 1] for length in range(head.config.slots)]
            after = head.logits_after(model, paths, rows(read)[0], fed)
    for row, values in zip(after, expected, strict=True):
        assert spread(row) == pytest.approx(values, abs=3e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_reused_slot_cache_returns_the_logits_of_a_new_one(name: str, tmp_path: Path) -> None:
    """For every path of a tree, whatever was accepted before."""
    model = target(torch.float64)
    head = opened(name, tmp_path, model).to(torch.float64)
    text = tiny.prompt(20, seed=4)
    taps = torch.cat(
        [INPUTS["state"] if len(head.config.taps) == 1 else INPUTS["taps"]] * 3, 1
    ).double()[..., : len(head.config.taps) * H]

    def cache() -> SlotCache:
        return SlotCache(HeadModel(head, model), model.vocab_size, 4)

    def drafted(cache: SlotCache, tokens: list[int], tree: bool) -> list[torch.Tensor]:
        with cache.lease():
            root = cache.read(tokens)
            if not tree:
                return [root, cache.extend([7], [ROOT]), cache.extend([9], [0])]
            level = cache.extend([3, 7], [ROOT, ROOT])
            return [root, level[1:], cache.extend([11, 9], [0, 1])[1:]]

    used, done = cache(), 0
    for length in (9, 12, 13, 17):
        used.notify(taps[:, done : length - 1])
        done = length - 1
        fresh = cache()
        fresh.notify(taps[:, :done])
        pairs = zip(
            drafted(used, text[:length], True), drafted(fresh, text[:length], False), strict=True
        )
        for row, expected in pairs:
            torch.testing.assert_close(row, expected)
        used.commit(text[length : length + 2])
    assert used.room(text) == head.config.slots


@pytest.mark.parametrize("mode", ["deterministic", "sampled", "sampled-without-replacement"])
def test_slots_draft_in_every_mode(mode: str, tmp_path: Path) -> None:
    model = target().model
    published_heads.write(tmp_path, *published_heads.hydra(True))
    width = 2 if "sampled" in mode else None
    _, results = heads.check_texts(model, tmp_path, 0.0, mode=mode, width=width)
    assert all(len(result.steps[1].tree) for result in results)


def test_heads_of_medusa_are_read_from_their_model(tmp_path: Path) -> None:
    config, weights = published_heads.medusa("medusa_head.")
    whole = weights | {"model.norm.weight": torch.ones(H)}
    first = open_head(published_heads.write(tmp_path / "whole", config, whole), target())
    second = open_head(published_heads.write(tmp_path / "alone", *published_heads.medusa()))
    states = second.state_dict()
    assert all(torch.equal(each, states[key]) for key, each in first.state_dict().items())


FORMS = ("peagle", "dflash", "medusa", "hydra", "hydra++")


@pytest.mark.parametrize("form", FORMS)
def test_slots_draft_with_the_logits_of_training(form: str) -> None:
    """Slot k of every pass is round k of the training."""
    model = target()
    head = fresh_head(model, torch.Generator().manual_seed(0), form=form, slots=3).eval()
    text, path = tiny.prompt(9, seed=4), [5, 8]
    whole = [*text, *path]
    taps = torch.randn(1, len(whole), len(head.config.taps) * H)
    cache = SlotCache(HeadModel(head, model), model.vocab_size, 4)
    cache.notify(taps[:, : len(text) - 1])
    with cache.lease():
        drafted = [cache.read(text), cache.extend([5], [ROOT]), cache.extend([8], [0])]
    embedded, real = model.embed(torch.tensor([whole])), torch.ones(1, len(whole)) > 0
    read, teacher = StateRead(embedded, taps, taps, real), Teacher(model, head)
    with torch.no_grad():
        for k, guessed in enumerate(rounds(head, read, 0.0, 1, mask=teacher.mask)):
            logits = head_output(head, teacher.output, k)(guessed.read[:, len(text) - 2 + k])
            torch.testing.assert_close(drafted[k], logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_one_slot_is_a_pass_too(form: str, tmp_path: Path) -> None:
    model = target()
    head = fresh_head(model, torch.Generator().manual_seed(0), form=form, slots=1)
    save_head(head, tmp_path)
    assert open_head(tmp_path).config.form == form  # without the target
    for place in (head, tmp_path):
        for result in heads.check_texts(model, place, 0.0, budget=4)[1]:
            assert {int(depths(step.tree.parents).max()) for step in result.steps[1:-1]} == {1}
    short = HeadTraining(2, form=form, slots=6, length=4)  # fewer tokens than slots
    assert len(list(HeadTrainer(model, [[1, 2, 3, 4]] * 4, short).run())) == 2


@pytest.mark.parametrize("form", FORMS)
def test_training_pays_in_every_form(form: str, tmp_path: Path) -> None:
    model = CausalTarget(heads.model(torch.float32))
    texts = [tiny.prompt(40, vocab_size=heads.VOCAB, seed=seed) for seed in range(64)]
    settings = replace(heads.TRAINING, steps=60, form=form, slots=2)
    steps: list[TrainingProgress] = []
    head = heads.train_head(model, texts, settings, on_step=steps.append)
    assert steps[-1].loss < 0.85 * steps[0].loss
    save_head(head, tmp_path)
    again = HeadTrainer(model, texts, settings, head=open_head(tmp_path, model))
    assert next(again.run()).loss == pytest.approx(steps[-1].loss, rel=0.3)


def test_windows_of_z_lab_are_causal_as_its_file_says(tmp_path: Path) -> None:
    config, weights = published_heads.zlab()
    config |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
    for top, inner, causal in (None, None, 1), (False, True, 0), (True, False, 1), (None, False, 0):
        config |= {"is_causal": top, "dflash_config": config["dflash_config"] | {"causal": inner}}
        published_heads.write(tmp_path, config, weights)
        assert open_head(tmp_path).config.causal_windows == bool(causal)


def test_unsupported_heads_are_refused(tmp_path: Path) -> None:
    for kind, part in (("dspark", "a Markov part"), ("dflash", "layers with windows")):
        published_heads.write(tmp_path, *published_heads.dflash(kind))
        with pytest.raises(InputError, match=f"{part}, which cannot be trained"):
            HeadTrainer(target(), [[1, 2, 3, 4]], HeadTraining(), head=open_head(tmp_path))
    with pytest.raises(InputError, match="depth=2 for a head that does not read its own output"):
        HeadTrainer(target(), [[1, 2, 3, 4]], HeadTraining(form="medusa", depth=2))
    with pytest.raises(InputError, match="for a head of medusa, which drafts all"):
        fresh_head(target(), torch.Generator(), form="medusa", tokens=[1, 2])
    published_heads.write(tmp_path, *published_heads.medusa())
    pair = target()
    pair.copies = 2
    with pytest.raises(UnsupportedModelError, match=r"one row a text\. Use --guidance 1"):
        HeadDrafter(tmp_path, pair)
