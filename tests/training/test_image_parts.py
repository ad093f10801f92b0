"""The parts of the image training that need no pictures: losses, misread codes, attention."""

import importlib

import pytest
import torch

module = importlib.import_module
pytestmark = pytest.mark.usefixtures("training_path")


def test_hue_and_edges_count() -> None:
    loss = module("image_tokenizer").picture_loss
    selection = torch.zeros(1, 3, 8, 8)
    grey, red = torch.full((1, 3, 8, 8), 0.1), torch.zeros(1, 3, 8, 8)
    red[:, 0] = 0.3
    assert float(loss(selection, selection)) == 0
    assert float(loss(red, selection)) > 2 * float(loss(grey, selection))
    striped = grey * torch.tensor([1.0, -1.0]).repeat(4)
    assert float(loss(striped, selection)) > 1.5 * float(loss(grey, selection))


def test_spread_is_least_for_an_even_spread() -> None:
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
    assert float(shares.max() - shares.min()) > 0.3, "each row has a share of its own"
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
