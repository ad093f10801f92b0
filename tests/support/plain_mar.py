"""A MAR checkpoint in the published layout: random weights, and a plain computation in NumPy.

Nothing of the library is used here, so that the two can be compared. One picture at a time, token
by token, in float64, after the paper (Li et al., arXiv 2406.11838) and improved DDPM (2102.09672).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SIDE, WIDTH, HIDDEN, HEADS, CLASSES, BUFFER = 3, 4, 12, 3, 3, 2
ENCODER, DECODER, INNER, HEAD_WIDTH, HEAD_LAYERS = 2, 1, 20, 10, 2
PLACES = SIDE * SIDE
Weights = dict[str, torch.Tensor]
Array = np.ndarray[Any, np.dtype[np.float64]]


def published(seed: int = 0, strength: float = 1.0) -> Weights:
    """Return random float64 weights by the published names; strength: of what the head predicts."""
    dice = torch.Generator().manual_seed(seed)
    instance: Weights = {}

    def table(name: str, *shape: int) -> None:
        instance[name] = 0.5 * torch.randn(shape, generator=dice, dtype=torch.float64)

    def linear(name: str, inner: int, outer: int, scale: float = 1.0) -> None:
        values = torch.randn(outer, inner, generator=dice, dtype=torch.float64)
        instance[f"{name}.weight"] = scale * values / math.sqrt(inner)
        instance[f"{name}.bias"] = 0.1 * torch.randn(outer, generator=dice, dtype=torch.float64)

    def norm(name: str, width: int) -> None:
        table(f"{name}.weight", width)
        instance[f"{name}.weight"] = 1.0 + 0.4 * instance[f"{name}.weight"]
        table(f"{name}.bias", width)

    table("class_emb.weight", CLASSES, HIDDEN)
    table("fake_latent", 1, HIDDEN)
    linear("z_proj", WIDTH, HIDDEN)
    norm("z_proj_ln", HIDDEN)
    table("encoder_pos_embed_learned", 1, BUFFER + PLACES, HIDDEN)
    table("decoder_pos_embed_learned", 1, BUFFER + PLACES, HIDDEN)
    table("diffusion_pos_embed_learned", 1, PLACES, HIDDEN)
    table("mask_token", 1, 1, HIDDEN)
    linear("decoder_embed", HIDDEN, HIDDEN)
    for half, layers in (("encoder", ENCODER), ("decoder", DECODER)):
        norm(f"{half}_norm", HIDDEN)
        for layer in range(layers):
            name = f"{half}_blocks.{layer}"
            norm(f"{name}.norm1", HIDDEN)
            linear(f"{name}.attn.qkv", HIDDEN, 3 * HIDDEN, 1.5)
            linear(f"{name}.attn.proj", HIDDEN, HIDDEN)
            norm(f"{name}.norm2", HIDDEN)
            linear(f"{name}.mlp.fc1", HIDDEN, INNER)
            linear(f"{name}.mlp.fc2", INNER, HIDDEN)
    net = "diffloss.net"
    linear(f"{net}.time_embed.mlp.0", 256, HEAD_WIDTH)
    linear(f"{net}.time_embed.mlp.2", HEAD_WIDTH, HEAD_WIDTH)
    linear(f"{net}.cond_embed", HIDDEN, HEAD_WIDTH)
    linear(f"{net}.input_proj", WIDTH, HEAD_WIDTH)
    for layer in range(HEAD_LAYERS):
        name = f"{net}.res_blocks.{layer}"
        norm(f"{name}.in_ln", HEAD_WIDTH)
        linear(f"{name}.mlp.0", HEAD_WIDTH, HEAD_WIDTH)
        linear(f"{name}.mlp.2", HEAD_WIDTH, HEAD_WIDTH)
        linear(f"{name}.adaLN_modulation.1", HEAD_WIDTH, 3 * HEAD_WIDTH)
    linear(f"{net}.final_layer.linear", HEAD_WIDTH, 2 * WIDTH, strength)
    linear(f"{net}.final_layer.adaLN_modulation.1", HEAD_WIDTH, 2 * HEAD_WIDTH)
    return instance


def silu(x: Array) -> Array:
    return np.asarray(x / (1.0 + np.exp(-x)))


def whitened(x: Array) -> Array:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6))


class Plain:
    """Reads the weights: states of places, the head's prediction, and whole pictures."""

    def __init__(self, weights: Weights, clip: float = math.inf) -> None:
        self.clip = clip
        self.w = {name: value.double().numpy() for name, value in weights.items()}

    def linear(self, name: str, x: Array) -> Array:
        return np.asarray(x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"])

    def norm(self, name: str, x: Array) -> Array:
        return np.asarray(whitened(x) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"])

    def block(self, name: str, x: Array) -> Array:
        size = HIDDEN // HEADS
        qkv = self.linear(f"{name}.attn.qkv", self.norm(f"{name}.norm1", x))
        heads = []
        for head in range(HEADS):
            q, k, v = (
                qkv[:, part * HIDDEN + head * size : part * HIDDEN + (head + 1) * size]
                for part in range(3)
            )
            scores = np.exp(q @ k.T / math.sqrt(size))
            heads.append(scores / scores.sum(-1, keepdims=True) @ v)
        x = x + self.linear(f"{name}.attn.proj", np.concatenate(heads, -1))
        inner = self.linear(f"{name}.mlp.fc1", self.norm(f"{name}.norm2", x))
        inner = inner * 0.5 * (1.0 + np.vectorize(math.erf)(inner / math.sqrt(2.0)))
        return np.asarray(x + self.linear(f"{name}.mlp.fc2", inner))

    def states(self, latents: Array, masked: list[bool], label: int | None) -> Array:
        """Return the states [N, H] of a picture whose latents [N, D] are known where not masked."""
        condition = self.w["fake_latent"][0] if label is None else self.w["class_emb.weight"][label]
        read = self.linear("z_proj", latents)
        rows = np.concatenate([np.repeat(condition[None], BUFFER, 0), read])
        rows = self.norm("z_proj_ln", rows + self.w["encoder_pos_embed_learned"][0])
        stays = [True] * BUFFER + [not each for each in masked]
        x = rows[stays]
        for layer in range(ENCODER):
            x = self.block(f"encoder_blocks.{layer}", x)
        x = self.linear("decoder_embed", self.norm("encoder_norm", x))
        whole = np.repeat(self.w["mask_token"][0], BUFFER + PLACES, 0)
        whole[stays] = x
        whole = whole + self.w["decoder_pos_embed_learned"][0]
        for layer in range(DECODER):
            whole = self.block(f"decoder_blocks.{layer}", whole)
        out = self.norm("decoder_norm", whole)[BUFFER:]
        return np.asarray(out + self.w["diffusion_pos_embed_learned"][0])

    def head(self, noisy: Array, time: int, state: Array) -> tuple[Array, Array]:
        """Return predicted noise [D] and where the variance lies [D]."""
        net = "diffloss.net"
        waves = [time * 10000.0 ** (-i / 128) for i in range(128)]
        clock = np.array([math.cos(a) for a in waves] + [math.sin(a) for a in waves])
        clock = self.linear(f"{net}.time_embed.mlp.0", clock)
        message = self.linear(f"{net}.time_embed.mlp.2", silu(clock))
        message = message + self.linear(f"{net}.cond_embed", state)
        x = self.linear(f"{net}.input_proj", noisy)
        for layer in range(HEAD_LAYERS):
            name = f"{net}.res_blocks.{layer}"
            shift, scale, gate = np.split(
                self.linear(f"{name}.adaLN_modulation.1", silu(message)), 3
            )
            inner = self.norm(f"{name}.in_ln", x) * (1 + scale) + shift
            inner = self.linear(f"{name}.mlp.2", silu(self.linear(f"{name}.mlp.0", inner)))
            x = x + gate * inner
        name = f"{net}.final_layer"
        shift, scale = np.split(self.linear(f"{name}.adaLN_modulation.1", silu(message)), 2)
        out = self.linear(f"{name}.linear", whitened(x) * (1 + scale) + shift)
        return out[:WIDTH], out[WIDTH:]

    def picture(
        self,
        label: int,
        order: list[int],
        noise: Callable[[int], Array],
        iterations: int,
        steps: int,
        guidance: float,
        temperature: float = 1.0,
    ) -> Array:
        """Return a picture's latents [N, D]; noise(place) [T + 1, D], whose last is the start."""
        masked, latents = [True] * PLACES, np.zeros((PLACES, WIDTH))
        for iteration in range(iterations):
            with_it = self.states(latents, masked, label)
            without = self.states(latents, masked, None)
            share = math.cos(math.pi / 2 * (iteration + 1) / iterations)
            left = max(1, min(sum(masked) - 1, math.floor(PLACES * share)))
            scale = 1 + (guidance - 1) * (PLACES - left) / PLACES
            still = order[-left:] if iteration < iterations - 1 else []
            for place in [p for p in range(PLACES) if masked[p] and p not in still]:
                states = (with_it[place], without[place])
                latents[place] = self.denoised(states, noise(place), steps, scale, temperature)
                masked[place] = False
        return latents

    def denoised(
        self, states: tuple[Array, Array], noise: Array, steps: int, scale: float, heat: float
    ) -> Array:
        """Return one latent [D] by improved DDPM on `steps` of 1,000 steps."""
        times, selected = respaced(steps)
        x = noise[steps]
        for step in reversed(range(steps)):
            noise_with, where = self.head(x, times[step], states[0])
            noise_without, _ = self.head(x, times[step], states[1])
            guided = noise_without + scale * (noise_with - noise_without)
            mean, log_variance = posterior(selected, step, x, guided, where, self.clip)
            x = mean
            if step:
                x = mean + heat * np.exp(0.5 * log_variance) * noise[step]
        return np.asarray(x)


def respaced(steps: int) -> tuple[list[int], list[float]]:
    """Return the times that are walked, and the share of the latent's variance left at each."""

    def left(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    selected, total = [], 1.0
    for t in range(1000):
        total *= 1.0 - min(1.0 - left((t + 1) / 1000) / left(t / 1000), 0.999)
        selected.append(total)
    times = [round(i * 999 / (steps - 1)) for i in range(steps)]
    return times, [selected[t] for t in times]


def posterior(
    selected: list[float], step: int, x: Array, noise: Array, where: Array, clip: float = math.inf
) -> tuple[Array, Array]:
    """Return mean and log variance of the state before, by way of the predicted latent."""

    def spread(at: int) -> tuple[float, float, float]:
        before = selected[at - 1] if at else 1.0
        beta = 1.0 - selected[at] / before
        return before, beta, beta * (1.0 - before) / (1.0 - selected[at])

    before, beta, least = spread(step)
    if step == 0:
        least = spread(1)[2]
    clean = x / math.sqrt(selected[step]) - math.sqrt(1.0 / selected[step] - 1.0) * noise
    clean = np.clip(clean, -clip, clip)
    mean = beta * math.sqrt(before) / (1.0 - selected[step]) * clean
    mean = mean + (1.0 - before) * math.sqrt(1.0 - beta) / (1.0 - selected[step]) * x
    share = (where + 1.0) / 2.0
    return mean, share * math.log(beta) + (1.0 - share) * math.log(least)
