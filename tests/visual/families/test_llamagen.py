"""LlamaGen's published files and folders: classes, prompts, negative prompts, sizes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.errors import InputError
from ragspec.sampling.settings import Sampling
from ragspec.visual import ImagePipeline
from tests.support import image_models, tiny_images
from tests.support.tiny_images import CODES, SIDE, dice
from tests.visual.models.test_llamagen_checkpoint import published as published_weights

LENGTH, WIDTH = 4, 224


def opened(model: Any, drafter: Any = "jacobi", **settings: Any) -> Any:
    return ImagePipeline(model, tiny_images.tokenizer(), drafter, budget=6, **settings)


def features(*sizes: int) -> list[torch.Tensor]:
    sample = torch.Generator().manual_seed(4)
    return [torch.randn(size, WIDTH, generator=sample, dtype=torch.float64) for size in sizes]


def guided(
    model: Any, features: torch.Tensor, negative: torch.Tensor | None, codes: list[int]
) -> Any:
    """Return the guided logits after codes below features [n, d], by masked forwards over all.

    Without negative features the guidance is from no prompt, padded as the prompt is.
    """
    rows = []
    for each in (features, negative):
        empty = LENGTH - len(features if each is None else each)
        condition = model.unconditional(1)
        if each is not None:
            padding = torch.full((empty, WIDTH), 9.0, dtype=torch.float64)
            condition = model.condition(torch.cat([padding, each])[None])
        ids = torch.tensor([codes], dtype=torch.int64)
        mask = image_models.masked(LENGTH + len(codes), empty)
        rows.append(model(ids, condition_embeds=condition, attention_mask=mask).logits[0, -1:])
    return rows[1] + 3.0 * (rows[0] - rows[1])


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_prompts_follow_a_masked_reference(temperature: float, negatives: int) -> None:
    model = tiny_images.model("features").double()
    current, none = features(2, 4, 1), features(1, 3, 4)[::-1]
    known = dict(zip("abcdef", [*current, *none], strict=True))
    encoder = {"text_encoder": lambda texts: [known[text] for text in texts]}
    request = {"guidance_scale": 3.0, "temperature": temperature}
    beside = list("def"[:negatives]) or None
    pipes = [opened(model, drafter, **encoder) for drafter in ("jacobi", None)]
    call = {"prompt": list("abc"), "negative_prompt": beside, **request}
    out, plain = (pipe(**call, generator=dice()) for pipe in pipes)
    for row, inputs in enumerate(current):
        negative = none[row % negatives] if negatives else None
        logits = partial(guided, model, inputs, negative)
        sampling, seed = Sampling(temperature=temperature), out.stats.seeds[row]
        expected = image_models.decode(logits, sampling, seed, count=SIDE**2)
        assert out.codes[row].flatten().tolist() == expected
    assert torch.equal(plain.codes, out.codes) and plain.stats.forwards > out.stats.forwards


def published(folder: Path, layers: int = 2, seed: int = 0) -> Path:
    """Write a model as LlamaGen publishes it, with its rotary table, and return the file."""
    weights = published_weights(tiny_images.model(layers=layers, seed=seed))
    weights["freqs_cis"] = torch.zeros(1 + SIDE**2, 8, 2)
    torch.save({"model": weights}, folder / f"{layers}.pt")
    return folder / f"{layers}.pt"


def test_published_files_and_folders_are_opened(tmp_path: Path) -> None:
    folder = tiny_images.save(tmp_path / "folder")
    plain = ImagePipeline.from_pretrained(folder, None)
    opening: dict[str, Any] = {"family": "llamagen", "tokenizer": folder / "tokenizer"}
    sizes: dict[str, Any] = {"grid_size": SIDE, "num_attention_heads": 2}
    pipes = [
        ImagePipeline.from_pretrained(folder, "model"),
        ImagePipeline.from_pretrained(published(tmp_path), **sizes, **opening),
        ImagePipeline.from_pretrained(published(tmp_path), published(tmp_path, 1, 1), **opening),
    ]
    expected = plain(class_labels=[0, 2], generator=dice())
    for pipe in pipes:
        out = pipe(class_labels=[0, 2], generator=dice())
        assert torch.equal(out.codes, expected.codes) and out.label == "exact"
    assert pipes[2].draft.config.num_hidden_layers == 1


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = published(tmp_path)
    with pytest.raises(InputError, match="tokenizer=PATH"):
        ImagePipeline.from_pretrained(file, family="llamagen", grid_size=SIDE)
    with pytest.raises(InputError, match="without a family"):
        ImagePipeline.from_pretrained(file, grid_size=SIDE)
    pipe = opened(tiny_images.model())
    with pytest.raises(InputError, match="negative_prompt"):
        pipe(class_labels=0, negative_prompt="cat")
    for wrong in (3, 4, 2 * SIDE + 2, 0, "6"):
        with pytest.raises(InputError, match="expected 6 pixels, for which the model was made"):
            pipe(class_labels=0, width=wrong)
    encoder = {"text_encoder": lambda texts: features(*[2] * len(texts))}
    text = opened(tiny_images.model("features"), **encoder)
    with pytest.raises(InputError, match="3 negative prompts for 2"):
        text(["a", "b"], negative_prompt=["c", "d", "e"])
    assert text.model.config.vocab_size == CODES
