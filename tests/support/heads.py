"""Tiny targets that a draft head can learn in seconds, heads for them, and expected logits.

A random model is hard to predict; a model of one layer with little attention is not.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ragspec import Engine, Generation, Sampling
from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.drafters.heads.fresh import fresh_head
from ragspec.drafters.heads.head import DraftHead
from ragspec.needs import LAST, HiddenStates
from ragspec.training.trainer import HeadTrainer, HeadTraining, TrainingProgress
from ragspec.verification.causal import CausalTarget
from ragspec.visual.models.target import ImageTarget
from tests.support import image_models, tiny

VOCAB = 24
TRAINING = HeadTraining(steps=100, batch_size=16, length=40, learning_rate=1e-2, seed=1)


@cache
def model(dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Return a text model of one layer, 32 wide; the same weights in every dtype."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    instance = copy.deepcopy(tiny.model("llama", vocab_size=VOCAB, seed=seed, **sizes))
    with torch.no_grad():
        instance.model.layers[0].self_attn.o_proj.weight *= 0.1
    return instance.to(dtype)


def train_head(
    target: CausalTarget,
    texts: Sequence[Sequence[int]],
    settings: HeadTraining,
    head: DraftHead | None = None,
    on_step: Callable[[TrainingProgress], None] = lambda step: None,
) -> DraftHead:
    """Return a head that was trained to the end."""
    trainer = HeadTrainer(target, texts, settings, head=head)
    for progress in trainer.run():
        on_step(progress)
    return trainer.head.eval()


@cache
def trained() -> DraftHead:
    """Return a head that was trained for `model` on random tokens."""
    texts = [tiny.prompt(40, vocab_size=VOCAB, seed=seed) for seed in range(128)]
    return train_head(CausalTarget(model(torch.float32)), texts, TRAINING)


def fresh(target: CausalTarget, seed: int = 0, **options: Any) -> DraftHead:
    """Return an untrained head; options: those of `fresh_head`."""
    head = fresh_head(target, torch.Generator().manual_seed(seed), **options)
    return head.to(target.dtype).eval()


def check_texts(
    model: Any, head: DraftHead | Path, temperature: float = 1.0, budget: int = 6, **options: Any
) -> tuple[HeadDrafter, list[Generation]]:
    """Check that the drafts of a head change no text; return its drafter, and what was written."""
    drafter = HeadDrafter(head, model, min_expected_gain=0.0, **options)
    prompts = [tiny.prompt(20, vocab_size=90, seed=1), tiny.prompt(7, vocab_size=90, seed=2)]
    sampling = Sampling(temperature=temperature, seed=3)
    plain, results = (
        Engine(model, drafter=each, budget=budget).generate(prompts, sampling, max_new_tokens=16)
        for each in (None, drafter)
    )
    assert [each.tokens for each in results] == [each.tokens for each in plain]
    assert not any(each.report.faults for each in results)
    return drafter, results


def picture_target(scale: float = 3.0) -> ImageTarget:
    """Return a tiny image target in float64, with guidance."""
    return image_models.target(image_models.model("class"), scale)


def states(target: CausalTarget, tokens: Sequence[int]) -> torch.Tensor:
    """Return what the output head reads at every token: [copies, T, H]."""
    with target.open(1, len(tokens)) as session:
        session.keep_hidden()
        session.read_prompts([list(tokens)], 0)
        return session.hidden[0].of((LAST,))


def last(states: torch.Tensor) -> HiddenStates:
    """Return last states [copies, T, H] as the hidden states of a forward."""
    return HiddenStates({LAST: states})


def distributions_below(
    head: DraftHead,
    target: CausalTarget,
    tokens: Sequence[int],
    path: Sequence[int],
    first: int = 0,
) -> torch.Tensor:
    """Return the head's logits after the text and after each token of a draft [D + 1, V].

    Without a cache: every token is read again for every logit. first: position of the first
    known state.
    """
    known = states(target, tokens)[:, first:-1]
    results = []
    for depth in range(len(path) + 1):
        text = torch.tensor([[*tokens[first + 1 :], *path[:depth]]])
        with torch.no_grad():
            guessed = head(target.embed(text), known).fed[:, -1:]
            position = torch.tensor([[len(tokens) + depth - 1]])
            results.append(target.head_logits(guessed, position)[0, 0])
        known = torch.cat([known, guessed], 1)
    return torch.stack(results)
