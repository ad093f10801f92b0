"""Tiny models of continuous latents with random weights, and targets over them."""

from pathlib import Path
from typing import Any

import torch

from ragspec import Engine, Sampling
from ragspec.visual.latents.model import LatentConfig, LatentModel
from ragspec.visual.latents.sampler import NoiseSchedule
from ragspec.visual.latents.target import LatentTable, LatentTarget
from ragspec.visual.models.target import ConditionTable
from tests.support import tiny_images

SIDE, CLASSES, WIDTH = 3, 3, 4


def model(
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    strength: float = 3.0,
    *,
    hidden: int = 32,
    head_width: int = 16,
    width: int = WIDTH,
    side: int = SIDE,
) -> Any:
    """Return a model whose latents depend on those before; strength: how much."""
    trunk = {
        **{"hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 48, "grid_size": side, "num_classes": CLASSES},
        "initializer_range": 0.3,
    }
    config = LatentConfig(
        latent_dim=width,
        head_width=head_width,
        head_layers=2,
        steps=5,
        floor=0.1,
        trunk=trunk,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        instance = LatentModel(config).eval().to(dtype)
    with torch.no_grad():
        instance.head.state.weight.mul_(strength)
        instance.head.write.weight.mul_(strength)
    return instance


def target(
    instance: Any,
    rows: int = 1,
    scale: float = 1.0,
    steps: int = 5,
    built_by: type[LatentTarget] = LatentTarget,
    table: LatentTable | None = None,
) -> LatentTarget:
    """Return the target of some rows, of classes in turn; table: for its latents."""
    labels = torch.arange(rows) % CLASSES
    conditions = ConditionTable(
        instance.trunk.condition(labels).detach(), instance.trunk.unconditional(1)[0].detach()
    )
    return built_by(instance, conditions, scale, NoiseSchedule(steps, 0.1), table)


def pictures(
    target: LatentTarget, drafter: Any, rule: Any, rows: int, seed: int = 0, **options: Any
) -> tuple[torch.Tensor, list[Any]]:
    """Return a picture of every row, latents [R, N, D], and what the engine reports of each."""
    result = Engine(target, None, drafter, budget=6, rule=rule, **options).generate(
        [target.prompt(row) for row in range(rows)],
        Sampling(temperature=1.0, seed=list(range(seed, seed + rows))),
        max_new_tokens=SIDE**2,
        ignore_eos=True,
    )
    return torch.stack([target.table.latents[list(each.tokens)] for each in result]), result


def save(root: Path, strength: float = 0.2) -> Path:
    """Write a model and a tokenizer to a folder for `ImagePipeline.from_pretrained`."""
    instance = model(dtype=torch.float32, strength=strength)
    instance.config.id2label = {}
    instance.save_pretrained(root / "target")
    draft = model(7, torch.float32, strength=strength, hidden=16, head_width=12)
    draft.save_pretrained(root / "draft")
    tiny_images.tokenizer().save_pretrained(root / "tokenizer", dtype=torch.float32)
    return root
