"""The schedule of a masked model's iterations, and the denoising steps of each latent.

The steps are those of improved DDPM (Nichol and Dhariwal, arXiv 2102.09672): T of 1,000 steps on
the cosine schedule. The network predicts the noise and the variance of a step between its bounds.
The last step has no noise, as published. The places per iteration follow MaskGIT's cosine (Chang et
al., arXiv 2202.04200), as in MAR.
"""

import math

import torch
from torch import Tensor

from ragspec.errors import InputError, pluralize
from ragspec.sampling.settings import whole
from ragspec.visual.checks import check_setting

TRAINED = 1000  # steps that the network was trained on
FLOOR = 0.1  # a deviation that costs an image 0.1 dB, see benchmarks/RESULTS.md
_OFFSET = 0.008
_MOST_BETA = 0.999  # of a step; 1 would lead to a division by zero

Step = int | Tensor


class LearnedSchedule:
    """T of the 1,000 steps; states are numbered T (noise) down to 0 (the latent).

    Entry t - 1 of the tables f64 [T] belongs to the distribution of x_(t - 1) given x_t: times (the
    network's input), alphas_cumprod (the latent's share of the variance), to_clean and to_noisy
    (factors of the mean), least and most (bounds of the log variance).

    Args:
        floor: The deviation of the last step, 0 as published. A positive floor is another
            distribution, in which latents have a density, so that drafts can be judged.

    Raises:
        InputError: There are fewer than 2 or over 1,000 steps, or floor is not from 0 to below 1.
    """

    def __init__(self, steps: int = 100, floor: float = 0.0) -> None:
        check_setting("floor", floor)
        self.floor = float(floor)
        count = whole(steps)
        if count is None or not 2 <= count <= TRAINED:
            raise InputError(
                f"got {steps!r} denoising steps; expected a whole number from 2 to {TRAINED}, such "
                "as 100."
            )
        self.steps = count
        stride = (TRAINED - 1) / (count - 1)
        self.times = [round(step * stride) for step in range(count)]
        times = torch.arange(TRAINED + 1, dtype=torch.float64) / TRAINED
        signal = ((times + _OFFSET) / (1.0 + _OFFSET) * (math.pi / 2.0)).cos().square()
        added = (1.0 - signal[1:] / signal[:-1]).clamp(max=_MOST_BETA)  # the noise of each step
        self.alphas_cumprod = (1.0 - added).cumprod(0)[self.times]
        before = torch.cat([self.alphas_cumprod.new_ones(1), self.alphas_cumprod[:-1]])
        betas = 1.0 - self.alphas_cumprod / before
        self.to_clean = betas * before.sqrt() / (1.0 - self.alphas_cumprod)
        self.to_noisy = (1.0 - before) * (1.0 - betas).sqrt() / (1.0 - self.alphas_cumprod)
        variance = betas * (1.0 - before) / (1.0 - self.alphas_cumprod)
        variance[0] = variance[1]  # the last step's is 0, which has no logarithm
        self.least, self.most = variance.log(), betas.log()

    # Below, `step` may also be a tensor of steps i64 [n] or [1] for rows [n, D].

    def clean(self, step: Step, noisy: Tensor, noise: Tensor) -> Tensor:
        """Return the latents [..., D], given states x_step and their predicted noise."""
        noise_factor = _at((1.0 - self.alphas_cumprod).sqrt(), step, noisy)
        return (noisy - noise_factor * noise) / _at(self.alphas_cumprod.sqrt(), step, noisy)

    def mean(self, step: Step, noisy: Tensor, clean: Tensor) -> Tensor:
        """Return the mean [..., D] of x_(step - 1), given x_step and the latent."""
        return _at(self.to_clean, step, noisy) * clean + _at(self.to_noisy, step, noisy) * noisy

    def log_variance(self, step: Step, variance: Tensor) -> Tensor:
        """Map predicted variances [..., D] of x_(step - 1), -1 to 1, to log variances."""
        least, most = _at(self.least, step, variance), _at(self.most, step, variance)
        return least + (variance + 1.0) / 2.0 * (most - least)

    def deviation(self, step: Step, variance: Tensor) -> Tensor:
        """Map predicted variances [..., D] to deviations of x_(step - 1), the floor in step 1."""
        deviation = (0.5 * self.log_variance(step, variance)).exp()
        last = torch.as_tensor(step, device=variance.device) == 1
        return torch.where(last[..., None], self.floor, deviation)


def _at(table: Tensor, step: Step, like: Tensor) -> Tensor:
    """Return the entry of a table f64 [T] for a step, or the entries [n, 1] for steps [n]."""
    return table[step - 1].to(like)[..., None]


def masked_counts(places: int, iterations: int) -> list[int]:
    """Return how many places are still masked after each iteration, 0 after the last.

    Raises:
        InputError: iterations are below 1 or above `places`; each generates at least one latent.
    """
    count = whole(iterations)
    if count is None or not 1 <= count <= places:
        raise InputError(
            f"got {iterations!r} iterations for {pluralize(places, 'latent')}; expected a whole "
            f"number from 1 to {places}: every iteration draws one at least."
        )
    left, counts = places, []
    for done in range(1, count):
        masked = math.floor(places * math.cos(math.pi / 2.0 * done / count))
        left = max(1, min(left - 1, masked))
        counts.append(left)
    return [*counts, 0]


def guidance_at(scale: float, places: int, left: int) -> float:
    """Return the guidance scale of an iteration after which `left` places are masked.

    It rises from 1 linearly with the share of generated latents; the last has one masked place.
    """
    return 1.0 + (scale - 1.0) * (places - max(1, left)) / places
