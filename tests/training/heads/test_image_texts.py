"""Images as texts for the training of a head: condition ids, then codes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.drafters.heads.head import check_head
from ragspec.errors import InputError
from ragspec.training.files import read_codes
from ragspec.training.image_texts import code_texts
from ragspec.verification.causal import read_states
from ragspec.visual.models.target import ConditionTable, ImageTarget
from tests.support import heads, image_models

CODES = torch.arange(64).view(4, 16) % image_models.BOOK


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("condition", ["class", "features"])
def test_a_picture_stands_below_its_condition(condition: str) -> None:
    model = image_models.model(condition)
    inputs = image_models.condition_inputs(model)[[2, 0, 2, 1]]
    target, texts = code_texts(model, CODES, inputs, seeded(), dropped=0.0)
    assert target.copies == 1
    length = target.condition_length
    assert [text[length:] for text in texts] == CODES.tolist()
    assert texts[0][:length] == texts[2][:length] != texts[1][:length]
    with torch.no_grad():
        expected = model.condition(inputs)
    for text, selection in zip(texts, expected, strict=True):
        target.check_prompt(text)
        torch.testing.assert_close(target.embed(torch.tensor([text[:length]]))[0], selection)
    other = torch.zeros(4, 3, 6) if condition == "class" else torch.zeros(4).long()
    with pytest.raises(InputError, match=r"as the model reads .* Store them in the file"):
        code_texts(model, CODES, other, seeded())


def test_zeros_before_a_caption_are_masked() -> None:
    model = image_models.model("features")
    inputs = image_models.condition_inputs(model)
    inputs[0, 0] = 0.0
    target, texts = code_texts(model, CODES[:3], inputs, seeded(), dropped=0.0)
    with torch.no_grad():
        table = ConditionTable(model.condition(inputs), model.unconditional(1)[0], (1, 0, 0))
    other = ImageTarget(model, table)
    for row, text in enumerate(texts):
        expected = read_states(other, [other.prompt(row) + text[target.condition_length :]])
        both = (next(each)[1].by_tap for each in (read_states(target, [text]), expected))
        torch.testing.assert_close(*both)


@pytest.mark.parametrize("condition", ["class", "features"])
def test_some_conditions_are_left_out(condition: str) -> None:
    model = image_models.model(condition)
    count = 400
    inputs = image_models.condition_inputs(model)[torch.arange(count) % 3]
    codes = CODES[:1].expand(count, -1)
    target, texts = code_texts(model, codes, inputs, seeded(), dropped=0.25)
    bare = target.prompt(3)
    assert 60 < sum(text[: len(bare)] == bare for text in texts) < 140
    with torch.no_grad():
        torch.testing.assert_close(target.embed(torch.tensor([bare]))[0], model.unconditional(1)[0])


def test_a_head_of_the_unguided_target_fits_the_guided_one() -> None:
    """A head that learns from the target without guidance also drafts for the guided one."""
    instance, _ = code_texts(image_models.model(), CODES, torch.tensor([0, 1, 2, 0]), seeded())
    check_head(heads.fresh(instance).config, image_models.target(image_models.model(), 3.0))


@pytest.mark.parametrize(
    ("codes", "inputs"),
    [
        (CODES.float(), torch.zeros(4).long()),
        (CODES[0], torch.zeros(16).long()),
        (torch.zeros(2, 17).long(), torch.zeros(2).long()),
        (CODES[:0], torch.zeros(0).long()),
        (CODES, torch.zeros(3).long()),
        (CODES + image_models.BOOK, torch.zeros(4).long()),
        (CODES - 1, torch.zeros(4).long()),
        (CODES, torch.full((4,), 9)),
    ],
)
def test_codes_and_conditions_that_do_not_fit_are_refused(
    codes: torch.Tensor, inputs: torch.Tensor
) -> None:
    with pytest.raises(InputError, match="expected"):
        code_texts(image_models.model(), codes, inputs, seeded())


def test_a_file_of_arrays_is_read(tmp_path: Path) -> None:
    path = tmp_path / "codes.npz"
    np.savez(path, codes=CODES.numpy().astype(np.uint16), labels=np.array([0, 1, 2, 0], np.uint8))
    codes, labels = read_codes(path)
    assert torch.equal(torch.from_numpy(codes), CODES)
    assert labels.tolist() == [0, 1, 2, 0]
    np.savez(path, codes=CODES.numpy(), features=np.ones((4, 3, 6)))
    assert read_codes(path)[1].dtype == np.float32


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "codes.npz"
    for part in ({"codes": CODES.numpy()}, {"labels": np.zeros(4)}, {}):
        np.savez(path, **part)
        with pytest.raises(InputError, match="expected the arrays"):
            read_codes(path)
    for content in (b"no arrays", b"", b"PK\x03\x04 no archive"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"cannot be read .*numpy\.savez") as caught:
            read_codes(path)
        assert "pickle" not in str(caught.value)
    np.save(tmp_path / "one.npy", CODES.numpy())
    (tmp_path / "one.npy").rename(path)
    odd = tmp_path / "odd.npz"
    np.savez(odd, codes=np.array([{}], dtype=object), labels=np.zeros(1))
    for each in (path, odd, tmp_path / "nowhere.npz"):
        with pytest.raises(InputError, match="cannot be read"):
            read_codes(each)
    for name in ("codes", "labels"):
        arrays: Any = {"codes": CODES.numpy(), "labels": np.zeros(4, int)}
        np.savez(path, **arrays | {name: np.full(4, 1.7)})
        with pytest.raises(InputError, match=f"{name} of float64; expected whole numbers"):
            read_codes(path)
