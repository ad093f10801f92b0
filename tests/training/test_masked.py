"""The loss of the script that trains a masked model; `test_image` trains one."""

import importlib

import numpy as np
import pytest
import torch

from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.schedule import LearnedSchedule
from tests.support import plain_mar, tiny_masked

module = importlib.import_module
pytestmark = pytest.mark.usefixtures("training_path")


def test_the_loss_of_a_masked_model_is_noise_and_the_divergence_of_a_step() -> None:
    torch.manual_seed(0)
    model = MaskedModel(tiny_masked.config(4, head_layers=1)).double()
    for weight in model.parameters():
        weight.data.normal_(0.0, 0.4)
    clean, message = torch.randn(6, 4).double(), torch.randn(6, 10).double()
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        result = module("masked_train").noise_loss(
            model, LearnedSchedule(1000), message, clean, dice
        )
    dice = torch.Generator().manual_seed(3)
    times = torch.randint(1000, (6,), generator=dice)
    noise = torch.randn(6, 4, generator=dice, dtype=torch.float32).double()
    _, selected = plain_mar.respaced(1000)
    total = 0.0
    for row, at in enumerate(times.tolist()):
        noisy = selected[at] ** 0.5 * clean[row] + (1 - selected[at]) ** 0.5 * noise[row]
        with torch.no_grad():
            message_noise, where = model.head(
                noisy[None], torch.tensor([at]), message[row : row + 1]
            )
        least = np.full(4, -1.0)
        true = plain_mar.posterior(selected, at, noisy.numpy(), noise[row].numpy(), least)
        mine = plain_mar.posterior(
            selected, at, noisy.numpy(), message_noise[0].numpy(), where[0].numpy()
        )
        difference = np.square(true[0] - mine[0]) / np.exp(mine[1])
        divergence = 0.5 * (mine[1] - true[1] + np.exp(true[1] - mine[1]) + difference - 1.0)
        error = np.square(message_noise[0].numpy() - noise[row].numpy())
        total += float((error + divergence / np.log(2.0)).mean())
    assert abs(float(result) / (total / 6) - 1.0) < 1e-3
