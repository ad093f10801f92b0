"""The scripts of the starter image models: data, tokenizer, training, export, heads, scores."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.drafters.heads.files import open_head
from ragspec.errors import InputError
from ragspec.visual import ImagePipeline, VQTokenizer
from ragspec.visual.families.latents import Latents
from ragspec.visual.families.llamagen import LlamaGen
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.schedule import LearnedSchedule
from tests.support import image_models, plain_mar, tiny_masked
from tests.support.scripts import run_script

module = importlib.import_module
pytestmark = pytest.mark.usefixtures("training_path")
ROOT = Path(__file__).resolve().parents[2]
EMBEDDER = ROOT / "ragspec" / "starter" / "embedder"
SMALL = {
    "target": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "draft": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1},
}


def test_sets_are_read_and_split(built_up: Path) -> None:
    data = module("image_data")
    emoji = data.read_pictures(built_up, "emoji")
    assert len(emoji) == 18 and len(data.read_pictures(built_up, "emoji", tones=True)) == 24
    assert emoji.images.shape == (18, 3, 32, 32) and not emoji.classes
    assert float(emoji.images.min()) >= -1 and float(emoji.images[:, :, 0].min()) == 1
    tiles = data.read_pictures(built_up, "tiles")
    assert tiles.labels.tolist() == [n % 32 for n in range(40)] and len(tiles.classes) == 32
    selected, held = data.split(tiles)
    assert (len(selected), len(held)) == (30, 10)
    assert sorted(selected.names + held.names) == sorted(tiles.names)
    assert [name for name in selected.names if name in held.names] == []
    assert data.split(tiles)[1].names == held.names


def test_conditions_are_labels_or_token_vectors(built_up: Path) -> None:
    data = module("image_data")
    tiles = data.read_pictures(built_up, "tiles")
    assert torch.equal(data.conditions(tiles, EMBEDDER), tiles.labels)
    features = data.conditions(data.read_pictures(built_up, "emoji"), EMBEDDER)
    assert features.shape == (18, data.CAPTION_LENGTH, 224)
    assert bool(features[:, 0].any()) and not bool(features[:, -1].any())


def tokenizer_trainer(seed: int = 1) -> Any:
    script = module("image_tokenizer")
    torch.manual_seed(seed)
    return script.Trainer(script.build_model(codes=32, widths=(8, 8, 8)), seed, 2e-3)


def test_the_codebook_is_learnt_and_used(built_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, data = module("image_tokenizer"), module("image_data")
    monkeypatch.setattr(script, "WARM_UP", 20)
    trainer = tokenizer_trainer()
    images = data.read_pictures(built_up, "tiles").images[:8]
    losses = [trainer.update(images, 1.0)["loss"] for _ in range(80)]
    assert losses[-1] < 0.6 * losses[0]
    tokenizer = trainer.tokenizer()
    assert torch.allclose(tokenizer.codebook(), trainer.book, atol=1e-6), "the trained book"
    assert len(tokenizer.encode(images).unique()) > 4
    sets = [data.read_pictures(built_up, "tiles").part(torch.tensor([n])) for n in range(2)]
    first, second = (set(tokenizer.encode(each.images).flatten().tolist()) for each in sets)
    assert len(first) < script.codes_in_use(tokenizer, sets) == len(first | second)


def resume(straight: Any, first: Any, second: Any, path: Path, update: Any) -> None:
    """Take five steps of a run at once, and again with a file after the third."""
    for trainer, steps in ((straight, 5), (first, 3)):
        for _ in range(steps):
            update(trainer)
    first.save(path)
    second.load(path)
    for _ in range(2):
        update(second)
    assert second.step == straight.step == 5


def test_tokenizer_resumes(built_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, data = module("image_tokenizer"), module("image_data")
    monkeypatch.setattr(script, "WARM_UP", 2)
    parts = {name: data.read_pictures(built_up, "tiles") for name in script.SHARES}
    straight, first, second = (tokenizer_trainer(seed) for seed in (1, 1, 9))

    def update(trainer: Any) -> None:
        trainer.update(script.batch(parts, 8, trainer.rng), 1.0)

    resume(straight, first, second, tmp_path / "last.pt", update)
    assert torch.equal(second.book, straight.book)
    for ours, theirs in zip(second.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_frozen_tokenizer_keeps_its_codes(built_up: Path) -> None:
    trainer = tokenizer_trainer()
    images = module("image_data").read_pictures(built_up, "tiles").images
    trainer.freeze()
    before = trainer.tokenizer()
    for _ in range(3):
        trainer.update(images[:8], 1.0)
    after = trainer.tokenizer()
    assert torch.equal(before.encode(images), after.encode(images))
    codes = before.encode(images)
    assert not torch.equal(before.decode(codes), after.decode(codes))


def pair_trainer(built_up: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> Any:
    script, data = module("image_train"), module("image_data")
    monkeypatch.setattr(module("image_model"), "SHAPES", SMALL)
    monkeypatch.setattr(script, "BATCH", 8)
    tokenizer = VQTokenizer(module("image_tokenizer").build_model(widths=(8, 8, 8)))
    parts = data.split(data.read_pictures(built_up, kind))
    rows, held = (script.Rows(tokenizer, part, EMBEDDER) for part in parts)
    return script.Trainer(kind, rows, held, 1, torch.tensor([[6e-3, 1e-2], [6e-3, 1e-2]]))


@pytest.mark.parametrize("kind", ["emoji", "tiles"])
def test_target_and_draft_learn(built_up: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    torch.manual_seed(0)
    trainer = pair_trainer(built_up, monkeypatch, kind)
    lines = [trainer.update(1.0) for _ in range(25)]
    for name in ("target", "draft"):
        assert lines[-1][name] < lines[0][name] - 0.5
    figures = trainer.measure()
    inputs = (*trainer.held.whole(), torch.tensor([False]))
    target, draft = (
        torch.distributions.Categorical(logits=each.logits(*inputs).detach())
        for each in (trainer.target, trainer.draft)
    )
    overlap = 1 - (target.probs - draft.probs).abs().sum(-1) / 2
    entropy = -(target.probs * target.logits).sum(-1)
    expected = (entropy, overlap, (target.mode == draft.mode).float())
    for name, each in zip(("entropy", "overlap", "agree"), expected, strict=True):
        assert 0 < figures[name] == pytest.approx(float(each.mean()), 1e-4)


def test_dropped_conditions_are_invisible(built_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pair_trainer(built_up, monkeypatch, "tiles")
    codes, _ = trainer.rows.draw(2, trainer.rng)
    codes = codes[:1].expand(2, -1)
    inputs = torch.tensor([3, 20])
    with torch.no_grad():
        visible = trainer.target.logits(codes, inputs, torch.tensor([False, False])).chunk(2)
        unseen = trainer.target.logits(codes, inputs, torch.tensor([True, True])).chunk(2)
    assert torch.equal(unseen[0], unseen[1])
    assert not torch.equal(visible[0], visible[1])


def test_the_run_resumes(built_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, first, second = (pair_trainer(built_up, monkeypatch, "tiles") for _ in range(3))
    for one in (first, second):
        one.rows = straight.rows  # the same tokenizer
    resume(straight, first, second, tmp_path / "tiles.pt", lambda trainer: trainer.update(1.0))
    for name in ("target", "draft"):
        for key, master in getattr(straight, name).masters.items():
            assert torch.equal(getattr(second, name).masters[key], master), key


def test_export_writes_the_running_mean(
    built_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = module("image_export")
    trainer = pair_trainer(built_up, monkeypatch, "tiles")
    monkeypatch.setattr(export, "SHAPES", SMALL)
    trainer.update(1.0)
    trainer.save(tmp_path / "tiles.pt")
    classes = [f"class {number}" for number in range(32)]
    export.export("tiles", tmp_path / "tiles.pt", tmp_path / "out", classes)
    llamagen = importlib.import_module("ragspec.visual.models.llamagen").LlamaGenModel
    for name in SMALL:
        model = llamagen.from_pretrained(tmp_path / "out" / name, dtype="auto")
        assert model.dtype == torch.bfloat16 and model.config.id2label[31] == "class 31"
        for key, value in model.named_parameters():
            assert torch.equal(value, getattr(trainer, name).mean[key].to(torch.bfloat16))
    sums = export.checksums(tmp_path / "out")
    assert set(sums) >= {"target/config.json", "target/model.safetensors", "draft/config.json"}
    with pytest.raises(ValueError, match="does not fit"):
        export.load_checkpoint("emoji", "target", tmp_path / "tiles.pt", [])


@pytest.mark.parametrize("script", ["latent_train", "masked_train"])
def test_models_of_latents_are_trained_saved_and_sampled(
    script: str, built_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latents = module(script)
    monkeypatch.setattr(module("latent_train"), "BATCH", 4)
    pictures = module("image_data").read_pictures(built_up, "tiles")
    tokenizer = VQTokenizer.from_pretrained(latents.TOKENIZER)
    options: dict[str, Any] = {}
    if script == "masked_train":
        small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
        monkeypatch.setattr(latents, "SIZES", latents.SIZES | small | {"head_width": 32})
        options = {"iterations": 6, "steps": 8}
        trainer, again = (latents.MaskedTrainer(pictures, tokenizer) for _ in range(2))
    else:
        small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        monkeypatch.setattr(latents, "TRUNK", small)
        trainer, again = (latents.Trainer(pictures, tokenizer, steps=4) for _ in range(2))
    before = trainer.measure()
    losses = [trainer.update(1.0) for _ in range(12)]
    trainer.save(tmp_path / "part.pt")
    again.load(tmp_path / "part.pt")
    assert again.update(1.0) == trainer.update(1.0) and again.step == trainer.step == 13
    assert trainer.measure() < before and min(losses) > 0.0
    again.export(tmp_path / "set")
    pipe = ImagePipeline.from_pretrained(tmp_path / "set", tokenizer=latents.TOKENIZER, **options)
    assert pipe.class_names[3] == "class 3"
    result = pipe(class_labels=["class 3"], seed=0)
    assert result.images[0].size == (32, 32) and result.latents.shape == (1, 8, 8, 8)
    if script == "latent_train":
        learns_to_draft(latents, pictures, tokenizer, tmp_path / "set")


def learns_to_draft(latents: Any, pictures: Any, tokenizer: VQTokenizer, place: Path) -> None:
    """Check that a draft model approaches the target of a folder and is written beside it."""
    teacher = Latents.load_model(place / "target", "cpu", "float32")
    trainer = latents.Trainer(pictures, tokenizer, steps=4, teacher=teacher)
    before, selected = trainer.measure(), teacher.head.write.weight.clone()
    for _ in range(12):
        trainer.update(1.0)
    assert trainer.measure() < before and torch.equal(teacher.head.write.weight, selected)
    trainer.export(place)
    pipe = ImagePipeline.from_pretrained(place, "model", tokenizer=latents.TOKENIZER)
    assert pipe.draft.config.head_width == latents.DRAFT_HEAD[0]
    assert pipe.draft.trunk.config.hidden_size == latents.DRAFT_TRUNK["hidden_size"]


def test_the_trunk_of_a_model_of_codes_stays_unchanged(
    built_up: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latents = module("latent_train")
    for name, value in (("BATCH", 4), ("READ_STEPS", 30), ("READ_PICTURES", 64)):
        monkeypatch.setattr(latents, name, value)
    pictures = module("image_data").read_pictures(built_up, "tiles")
    tokenizer = VQTokenizer.from_pretrained(latents.TOKENIZER)
    source = Path("ragspec/starter/images/tiles/target")
    trainer = latents.Trainer(pictures, tokenizer, steps=4, taken=source)
    model, before = trainer.model, trainer.measure()
    selected = {name: value.clone() for name, value in model.trunk.state_dict().items()}
    head = model.head.write.weight.detach().clone()
    for _ in range(6):
        trainer.update(1.0)
    weights = load_file(source / "model.safetensors")
    taken = "layers.0.attention.qkv_proj.weight"
    assert torch.equal(selected[taken], weights[taken].float())
    assert all(
        torch.equal(value, selected[name]) for name, value in model.trunk.state_dict().items()
    )
    assert not torch.equal(model.head.write.weight, head) and trainer.measure() < before
    with pytest.raises(ValueError, match="does not fit"):
        latents.Trainer(pictures, tokenizer, steps=4, taken=source.parent / "draft")


def test_hue_and_edges_count() -> None:
    loss = module("image_tokenizer").picture_loss
    selection = torch.zeros(1, 3, 8, 8)
    grey, red = torch.full((1, 3, 8, 8), 0.1), torch.zeros(1, 3, 8, 8)
    red[:, 0] = 0.3
    assert float(loss(selection, selection)) == 0
    assert float(loss(red, selection)) > 2 * float(loss(grey, selection))
    striped = grey * torch.tensor([1.0, -1.0]).repeat(4)
    assert float(loss(striped, selection)) > 1.5 * float(loss(grey, selection))


def test_the_spread_loss_is_0_for_an_even_spread() -> None:
    spread, even = module("image_tokenizer").spread_loss, torch.cat([torch.eye(8), -torch.eye(8)])
    assert float(spread(even)) == 0
    assert float(spread(even[:3])) > 0.1


def test_misread_codes_come_from_the_next_row() -> None:
    misread = module("image_train").misread
    codes = torch.arange(40 * 64).view(40, 64)
    read = misread(codes, 0.5, torch.Generator().manual_seed(0))
    wrong = read != codes
    assert torch.equal(read[wrong], codes.roll(1, 0)[wrong])
    shares = wrong.float().mean(1)
    assert 0.2 < float(shares.mean()) < 0.3 and float(shares.max()) < 0.7
    assert float(shares.max() - shares.min()) > 0.3, "the share differs by row"
    assert torch.equal(misread(codes, 0.0, torch.Generator().manual_seed(0)), codes)


def test_the_plain_attention_is_causal_attention() -> None:
    build = module("image_model")
    torch.manual_seed(2)
    model = build.build_model("tiles", "draft").double().eval()
    codes = torch.randint(1024, (2, 63))
    condition = model.condition(torch.tensor([1, 30]))
    stock = model(codes, condition_embeds=condition, use_cache=False).logits
    build.use_plain_attention(model)
    ours = model(codes, condition_embeds=condition, use_cache=False).logits
    assert torch.allclose(ours, stock, atol=1e-10)


@torch.no_grad()
def test_the_loss_of_a_masked_model_is_noise_and_the_divergence_of_a_step() -> None:
    torch.manual_seed(0)
    model = MaskedModel(tiny_masked.config(4, head_layers=1)).double()
    for weight in model.parameters():
        weight.data.normal_(0.0, 0.4)
    clean, message = torch.randn(6, 4).double(), torch.randn(6, 10).double()
    loss, dice = module("masked_train").noise_loss, torch.Generator().manual_seed(3)
    result = loss(model, LearnedSchedule(1000), message, clean, dice)
    dice = torch.Generator().manual_seed(3)
    times = torch.randint(1000, (6,), generator=dice)
    noise = torch.randn(6, 4, generator=dice, dtype=torch.float32).double()
    _, selected = plain_mar.respaced(1000)
    total = 0.0
    for row, at in enumerate(times.tolist()):
        noisy = selected[at] ** 0.5 * clean[row] + (1 - selected[at]) ** 0.5 * noise[row]
        inputs = noisy[None], torch.tensor([at]), message[row : row + 1]
        predicted, where = (each[0].numpy() for each in model.head(*inputs))
        least = np.full(4, -1.0)
        true = plain_mar.posterior(selected, at, noisy.numpy(), noise[row].numpy(), least)
        mine = plain_mar.posterior(selected, at, noisy.numpy(), predicted, where)
        difference = np.square(true[0] - mine[0]) / np.exp(mine[1])
        divergence = 0.5 * (mine[1] - true[1] + np.exp(true[1] - mine[1]) + difference - 1.0)
        error = np.square(predicted - noise[row].numpy())
        total += float((error + divergence / np.log(2.0)).mean())
    assert abs(float(result) / (total / 6) - 1.0) < 1e-3


class Codes:
    """Replaces the images of a set by random codes."""

    def draw(self, count: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(image_models.BOOK, (count, 16), generator=rng)
        return codes, torch.arange(count) % image_models.CLASSES


def test_heads_are_written_beside_their_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = module("image_head")
    for name in ("read_pictures", "split"):
        monkeypatch.setattr(script, name, lambda *arguments: [None])
    monkeypatch.setattr(script, "Rows", lambda *arguments: Codes())
    monkeypatch.setattr(script.VQTokenizer, "from_pretrained", lambda path: None)
    image_models.model("class").save_pretrained(tmp_path / "tiles" / "target")
    requests = ["--sets", "tiles", "--models", str(tmp_path), "--steps", "3", "--pictures", "100"]
    monkeypatch.setattr("sys.argv", ["image_head.py", *requests])
    script.main()
    assert "step 0" in capsys.readouterr().out
    head = open_head(tmp_path / "tiles" / "head")
    target = image_models.target(LlamaGen.load_model(tmp_path / "tiles" / "target"), 2.0)
    assert HeadDrafter(head, target).head.config.vocab_size == image_models.BOOK


def test_answers_are_counted() -> None:
    script = module("image_recognition")
    answers = script.read_answers("0 fish\n2 -\n1 Red Heart\n", 3)
    assert answers == ["fish", "red heart", "-"]
    result = script.score(["fish", "green heart", "fish"], answers)
    assert result["right"] == 1 and result["by_name"] == {"fish": 1, "green heart": 0}


@pytest.mark.parametrize("text", ["0 fish\n", "0 fish\n1 red hart\n", ""])
def test_missing_and_other_names_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected"):
        module("image_recognition").read_answers(text, 2)


def test_the_interval_is_wilsons() -> None:
    interval = module("image_recognition").interval
    assert interval(99, 120) == pytest.approx((0.747, 0.883), abs=1e-3)
    assert interval(0, 10)[0] == 0.0 and interval(10, 10)[1] == pytest.approx(1.0)
    assert interval(0, 10)[1] == pytest.approx(0.2775, abs=1e-3)


def test_a_network_is_written_for_each_set(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "images"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for kind, name, classes in (("tiles", "label", 3), ("emoji", "subgroup", 5)):
        labels = rng.integers(0, classes, 300).astype(np.uint8)
        images = (rng.integers(0, 40, (300, 32, 32, 3)) + 40 * labels[:, None, None, None]) % 256
        arrays = {"images": images.astype(np.uint8), name: labels}
        np.savez(folder / f"{kind}32.npz", allow_pickle=False, **arrays)
    script, out = ROOT / "training" / "image_features.py", tmp_path / "out"
    written = run_script(script, "--steps", "3", "--shared", tmp_path, "--out", out, cwd=ROOT)
    assert "on held-out pictures" in written
    for kind, classes in (("tiles", 3), ("emoji", 5)):
        weights = load_file(tmp_path / "out" / kind / "features.safetensors")
        assert len(weights["head.weight"]) == classes
