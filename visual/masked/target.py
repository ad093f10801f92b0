"""A masked model as a target: one place after the other, in the order of each image's seed.

That is the distribution that drafts are judged under: as many iterations as there are latents (see
`MaskedSampler`). Attention looks both ways, so that a chain of n drafts takes n + 1 masked prefixes
in one batch in one forward, and no cache outlives it. Rows hold numbers of a `LatentTable`; a
prompt is one id above them, the number of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.path_rows import ListedRows
from ragspec.visual.latents.sampler import LatentSample
from ragspec.visual.latents.table import MOST_LATENTS, LatentTable
from ragspec.visual.latents.target import LatentDraws, LatentView, expect_steps
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.sampler import NoiseSampler, order_of
from ragspec.visual.masked.schedule import LearnedSchedule, guidance_at


class MaskedTarget(LatentDraws, CausalTarget):
    """A `MaskedModel`, ready for `Engine`. Tokens are numbers of `table`.

    labels i64 [M], noises: the class and the noise of each image of the call; `prompt(m)` stands
    for it, and its row must have that seed. schedule, scale, temperature: see `MaskedSampler`; the
    scale of a latent goes by its index. ahead: latents that each forward also draws behind its
    deepest prefix, all under that one, which `guess` tells. table: of the target that a draft model
    draws for. Of `CausalTarget` it is a child to be an engine's; it shares no cache and no forward
    with it. Raises InputError.
    """

    generation_config = None

    def __init__(
        self,
        model: MaskedModel,
        schedule: LearnedSchedule,
        labels: Tensor,
        noises: Sequence[NoiseStream],
        scale: float = 1.0,
        temperature: float = 1.0,
        *,
        ahead: int = 0,
        table: LatentTable | None = None,
    ) -> None:
        self.model, self.schedule = model, schedule
        self.device, self.dtype = model.device, model.dtype
        self.vocab_size, self.input_size = MOST_LATENTS, MOST_LATENTS + len(noises)
        self.max_length = 1 + model.places
        self.guidance_scale, self.temperature, self.ahead = float(scale), temperature, ahead
        self.copies = 1 if self.guidance_scale == 1.0 else 2
        self.labels, self.noises = labels, tuple(noises)
        self.orders = torch.stack([order_of(noise, model.places) for noise in self.noises])
        self._order_of = dict(zip(self.noises, self.orders, strict=True))
        self.view = MaskedView
        self.sampler = self.sampler_at(0)
        self.prefixes = 0  # read so far
        width, kind = model.config.latent_dim, torch.promote_types(model.dtype, torch.float32)
        like = torch.zeros(0, device=model.device, dtype=kind)
        self.table = table or LatentTable(schedule.steps, width, like, self.sampler.spread)
        expect_steps(self.table, schedule.steps, width)
        self._ahead: dict[int, tuple[Tensor, list[int]]] = {}
        self._guesses: dict[int, dict[int, int]] = {}

    def prompt(self, picture: int) -> list[int]:
        """Return the prompt of an image: one id."""
        return [MOST_LATENTS + picture]

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise InputError for a prompt that does not begin with the id of an image, alone."""
        if len(tokens) != 1 or not 0 <= picture_of(tokens) < len(self.noises):
            raise InputError(f"got the prompt {list(tokens)}; expected one of target.prompt(m).")

    def open(self, rows: int, capacity: int) -> MaskedSession:  # type: ignore[override]
        """Return an empty session of B rows; nothing is cached, so capacity is of no account."""
        return MaskedSession(self, rows)

    def draft_cache(self, capacity: int) -> MaskedReader:
        """Return what reads a text for drafts of it; see `LatentTarget.draft_cache`."""
        return MaskedReader(self)

    @torch.no_grad()
    def read(self, pictures: Sequence[int], known: Sequence[Sequence[int]]) -> Tensor:
        """Return what is told of all places of images [R, N, C, H], R masked prefixes at once.

        known: the numbers of the latents that stand there, in the order of the image.
        """
        model, rows, device = self.model, len(pictures), self.device
        sizes = [len(each) for each in known]
        held = torch.zeros(rows, max(sizes), dtype=torch.int64)
        for row, numbers in zip(held, known, strict=True):
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        which = torch.tensor(pictures)
        places = self.orders[which][:, : held.shape[1]].to(device)
        latents = self.table.latents[held.to(device)].to(model.dtype)
        whole = latents.new_zeros(rows, model.places, latents.shape[-1])
        whole.scatter_(1, places[..., None].expand_as(latents), latents)
        counts = None if min(sizes) == max(sizes) else torch.tensor(sizes, device=device)
        condition = model.condition(self.labels[which])
        if self.copies == 2:
            condition = torch.cat([condition, model.unconditional(rows)])
            whole, places = whole.repeat(2, 1, 1), places.repeat(2, 1)
            counts = None if counts is None else counts.repeat(2)
        states = model.states(whole, places, condition, counts)
        by_row: Tensor = states.reshape(self.copies, rows, model.places, -1).permute(1, 2, 0, 3)
        return by_row

    def at(self, states: Tensor, picture: int, indices: Sequence[int]) -> Tensor:
        """Return the states [n, C * H] of the latents at some indices, of all places [N, C, H]."""
        places = self.orders[picture][list(indices)].to(states.device)
        return states[places].flatten(1)

    def draw(self, views: Sequence[LatentView]) -> None:
        """Draw the target's own latents at every place of all views, and those ahead of them."""
        super().draw(views)
        for view in views:
            assert isinstance(view, MaskedView)
            indices = self.latents_to_draw(view)[1]
            self._guesses[view.picture] = dict(zip(indices, view.target_number, strict=True))

    def latents_to_draw(self, view: LatentView) -> tuple[Tensor, Sequence[int]]:
        """Return states [n, C * H] and indices of a view's nodes, and of what lies ahead."""
        assert isinstance(view, MaskedView)
        states, indices = self._ahead[view.picture]
        return torch.cat([view.states, states]), [*view.indices, *indices]

    def guess(self, picture: int, index: int) -> int | None:
        """Return the number of the latent that the last forward drew for an index, where it did."""
        return self._guesses.get(picture, {}).get(index)

    def foresee(self, picture: int, states: Tensor, index: int) -> None:
        """Keep states [N, C, H] of an image's deepest prefix for what comes from `index` on."""
        indices = list(range(index, min(index + self.ahead, self.model.places)))
        self._ahead[picture] = (self.at(states, picture, indices), indices)

    @torch.no_grad()
    def add(self, states: Tensor, noise: Tensor, indices: Sequence[int]) -> range:
        """Draw latents in states [n, C * H] with noise [n, T + 1, D]; return their numbers."""
        samplers = [self.sampler_at(index) for index in indices]
        conditioning = samplers[0].conditioning(states.reshape(len(states), self.copies, -1))
        sample = self._samples(conditioning, noise.to(self.table.paths), indices)
        return self.table.add(sample, indices, samplers)

    def _samples(self, conditioning: Tensor, noise: Tensor, indices: Sequence[int]) -> LatentSample:
        listed = [[self.scale_at(each)] for each in indices]
        scales = torch.tensor(listed, dtype=torch.float64).to(noise)
        sampler = NoiseSampler(self.model, self.schedule, scales, self.temperature)
        return sampler.draw(conditioning, noise)

    def noise(self, noise: NoiseStream, indices: Sequence[int]) -> Tensor:
        """Return the normal numbers of latents, which go by their places: f64 [n, T + 1, D]."""
        return super().noise(noise, self._order_of[noise][list(indices)].tolist())

    def scale_at(self, index: int) -> float:
        """Return the guidance of a latent, one of N iterations."""
        places = self.model.places
        return guidance_at(self.guidance_scale, places, places - 1 - index)

    def sampler_at(self, index: int) -> NoiseSampler:
        """Return what denoises the latent of an index."""
        return NoiseSampler(self.model, self.schedule, self.scale_at(index), self.temperature)


class MaskedView(LatentView):
    """See `LatentView`; image: whose number of the call the prompt tells."""

    target: MaskedTarget

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.picture = picture_of(self._context)


class MaskedSession(ListedRows[list[int]]):
    """The images of one generation, read again at every forward; see `TargetSession`."""

    def __init__(self, target: MaskedTarget, rows: int) -> None:
        super().__init__(rows, list, list)
        self.target = target
        self._read: list[tuple[list[int], DraftTree]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.line_up([])

    def admit(self, tree: DraftTree, row: int = 0, text: Sequence[int] = ()) -> DraftTree:
        """Return the whole draft, which must be a chain."""
        return tree

    def verify(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> Tensor:
        """Read one masked prefix a node, in one forward; returns states [B, N + 1, C * H]."""
        target, pictures, known = self.target, list[int](), list[list[int]]()
        self._read = [([*pending[row]], tree) for row, tree in enumerate(trees)]
        for text, (fresh, tree) in zip(self.active_rows, self._read, strict=True):
            whole = [*text, *fresh, *tree.tokens.tolist()]
            depths = range(len(whole) - len(tree), len(whole) + 1)
            pictures += [picture_of(whole)] * len(depths)
            known += [whole[1:depth] for depth in depths]
        states = target.read(pictures, known)
        target.prefixes += len(known)
        parts, start = [], 0
        for tree in trees:
            rows = range(start, start + len(tree) + 1)
            parts.append(
                torch.cat([target.at(states[r], pictures[r], [len(known[r])]) for r in rows])
            )
            last = rows[-1]
            target.foresee(pictures[last], states[last], len(known[last]) + 1)
            start = rows.stop
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the pending numbers and those of the accepted nodes."""
        for text, (fresh, tree), path in zip(self.active_rows, self._read, paths, strict=True):
            text += [*fresh, *(int(tree.tokens[node]) for node in path)]


class MaskedReader:
    """The text that a draft model reads and its draft above it; see `DraftCache`."""

    def __init__(self, target: MaskedTarget) -> None:
        self._target = target
        self._text: list[int] = []

    def lease(self) -> AbstractContextManager[None]:
        """Return a context in which the model may run."""
        return nullcontext()

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many latents may follow this text."""
        return int(self._target.model.places) + 1 - len(tokens)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read a text; return the states of what follows [1, C * H]."""
        self._text = list(tokens)
        return self._states()

    def extend(self, tokens: Sequence[int], above: Sequence[int]) -> Tensor:
        """Read on in a chain of drafts; return the states of what follows the last [1, C * H]."""
        self._text += tokens
        return self._states()

    def commit(self, tokens: Sequence[int]) -> None:
        """Forget the draft: the next text is read again."""
        self._text = []

    def _states(self) -> Tensor:
        picture, known = picture_of(self._text), self._text[1:]
        states = self._target.read([picture], [known])[0]
        return self._target.at(states, picture, [len(known)])


def picture_of(tokens: Sequence[int]) -> int:
    """Return the number of the image that a text is of."""
    return int(tokens[0]) - MOST_LATENTS
