"""A masked model as a target: one latent after the other, in the order of each image's seed.

Drafts are judged under this distribution, which has as many iterations as latents (see
`MaskedSampler`). Attention is bidirectional, so a chain of n drafts takes n + 1 masked prefixes in
one forward, and no cache outlives it. Rows hold numbers of a `LatentTable`. A prompt is one id
above them, which stands for an image.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ragspec.errors import InputError
from ragspec.needs import Capabilities
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.base import TargetSession
from ragspec.verification.causal import CausalTarget
from ragspec.visual.latents.target import MOST_LATENTS, LatentDraws, LatentTable, LatentView
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.schedule import LearnedSchedule, NoiseSampler, guidance_at, order_of


class MaskedTarget(LatentDraws, CausalTarget):
    """A `MaskedModel`, ready for `Engine`. Tokens are numbers of `table`.

    The engine requires a `CausalTarget`; this one shares no cache and no forward with its base.

    Args:
        schedule, scale, temperature: See `MaskedSampler`; the scale of a latent depends on its
            index.
        labels i64 [M], noises: The class and the noise of each image of the call. `prompt(m)`
            stands for image m, and its row must have that seed.
        ahead: Latents that each forward also samples behind its deepest prefix, all under that
            prefix; see `guess`.
    """

    orders: Tensor
    capabilities = Capabilities(False, False, True, False, "a masked model of latents")
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
    ) -> None:
        self.model, self.schedule = model, schedule
        self.vocab_size, self.input_size = MOST_LATENTS, MOST_LATENTS + len(noises)
        self.max_length = 1 + model.places
        self.guidance_scale, self.temperature, self.ahead = float(scale), temperature, ahead
        self.copies = 1 if self.guidance_scale == 1.0 else 2
        self.labels, self.noises = labels, tuple(noises)
        self.orders = torch.stack([order_of(noise, model.places) for noise in self.noises])
        self._order_of = dict(zip(self.noises, self.orders, strict=True))
        self.sampler = self.sampler_at(0)
        width, kind = model.config.latent_dim, torch.promote_types(model.dtype, torch.float32)
        like = torch.zeros(0, device=model.device, dtype=kind)
        self.table = LatentTable(schedule.steps, width, like)
        self.next_states: dict[int, tuple[Tensor, range]] = {}  # states and indices ahead, by image
        self._guesses: dict[int, dict[int, int]] = {}

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return torch.device(self.model.device)

    def prompt(self, picture: int) -> list[int]:
        """Return the prompt of an image: one id."""
        return [MOST_LATENTS + picture]

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise InputError unless the prompt is the id of one image."""
        if len(tokens) != 1 or not 0 <= picture_of(tokens) < len(self.noises):
            raise InputError(f"got the prompt {list(tokens)}; expected one of target.prompt(m).")

    def open(self, rows: int = 0, *_: object, **__: object) -> "MaskedSession":  # type: ignore[override]
        """Return an empty session of B rows; it caches nothing and ignores the capacity."""
        return MaskedSession(self, rows)

    @torch.no_grad()
    def read(self, pictures: Sequence[int], prefixes: Sequence[Sequence[int]]) -> Tensor:
        """Return the states [R, N, C, H] of all places under R masked prefixes, in one forward.

        Args:
            pictures: The image of each prefix.
            prefixes: The numbers of the known latents, in the order of the image.
        """
        model, rows, device = self.model, len(pictures), self.device
        sizes = [len(each) for each in prefixes]
        numbers = [torch.tensor(each, dtype=torch.int64) for each in prefixes]
        held = pad_sequence(numbers, batch_first=True)
        which = torch.tensor(pictures)
        places = self.orders[which][:, : held.shape[1]].to(device)
        latents = self.table.latents[held.to(device)].to(model.dtype)
        whole = latents.new_zeros(rows, model.places, latents.shape[-1])
        whole.scatter_(1, places[..., None].expand_as(latents), latents)
        counts = torch.tensor(sizes * self.copies, device=device) if len({*sizes}) > 1 else None
        condition = model.condition(self.labels[which], self.copies)
        if self.copies == 2:
            whole, places = whole.repeat(2, 1, 1), places.repeat(2, 1)
        states = model.states(whole, places, condition, counts)
        by_row: Tensor = states.reshape(self.copies, rows, model.places, -1).permute(1, 2, 0, 3)
        return by_row

    def at(self, states: Tensor, picture: int, indices: Sequence[int]) -> Tensor:
        """Select the states [n, C * H] of some indices from those of all places [N, C, H]."""
        return states[self.orders[picture][list(indices)].to(states.device)].flatten(1)

    def draw(self, views: Sequence[LatentView]) -> None:
        """Sample the target's latents for every node of all views, and those ahead of them."""
        super().draw(views)
        for view in views:
            numbers = dict(zip(self.latents_to_draw(view)[1], view.target_number, strict=True))
            self._guesses[picture_of(view.context)] = numbers

    def latents_to_draw(self, view: LatentView) -> tuple[Tensor, Sequence[int]]:
        """Return states [n, C * H] and indices of a view's nodes, then of the latents ahead."""
        states, indices = self.next_states[picture_of(view.context)]
        return torch.cat([view.logits, states]), [*view.indices, *indices]

    def guess(self, picture: int, index: int) -> int | None:
        """Return the number of the latent that the last forward sampled for an index, or None."""
        return self._guesses.get(picture, {}).get(index)

    @torch.no_grad()
    def add(self, states: Tensor, noise: Tensor, indices: Sequence[int]) -> range:
        """Sample latents in states [n, C * H] with noise [n, T + 1, D]; return their numbers."""
        samplers, noise = [self.sampler_at(index) for index in indices], noise.to(self.table.paths)
        scales = torch.tensor([[each.scale] for each in samplers], dtype=torch.float64).to(noise)
        sampler = NoiseSampler(self.model, self.schedule, scales, self.temperature)
        conditioning = sampler.conditioning(states.reshape(len(states), self.copies, -1))
        return self.table.add(sampler.draw(conditioning, noise), indices, samplers)

    def noise(self, noise: NoiseStream, indices: Sequence[int]) -> Tensor:
        """Return normal numbers f64 [n, T + 1, D] for n latents; they depend on the places."""
        return super().noise(noise, self._order_of[noise][list(indices)].tolist())

    def sampler_at(self, index: int) -> NoiseSampler:
        """Return the sampler of the latent at an index, under its guidance scale."""
        places = self.model.places
        scale = guidance_at(self.guidance_scale, places, places - 1 - index)
        return NoiseSampler(self.model, self.schedule, scale, self.temperature)


class MaskedSession(TargetSession):
    """The texts of one generation, which every forward reads anew; drafts are chains."""

    target: MaskedTarget
    _rows: dict[int, list[int]]

    def __init__(self, target: MaskedTarget, rows: int) -> None:
        super().__init__(target, rows)
        self._read: list[tuple[list[int], DraftTree]] = []

    def new_row(self) -> list[int]:
        """Return an empty text."""
        return []

    def copy_row(self, row: int) -> list[int]:
        """Return a copy of a text."""
        return list(self._rows[row])

    def verify(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> list[Tensor]:
        """Read one masked prefix per node in one forward; return states [N + 1, C * H] of rows."""
        target, pictures, prefixes = self.target, list[int](), list[list[int]]()
        self._read = [([*pending[row]], tree) for row, tree in enumerate(trees)]
        for text, (fresh, tree) in zip(self.active_rows, self._read, strict=True):
            whole = [*text, *fresh, *tree.tokens.tolist()]
            depths = range(len(whole) - len(tree), len(whole) + 1)
            pictures += [picture_of(whole)] * len(depths)
            prefixes += [whole[1:depth] for depth in depths]
        states = target.read(pictures, prefixes)
        parts, start = [], 0
        for tree in trees:
            rows = range(start, start + len(tree) + 1)
            node_states = [target.at(states[r], pictures[r], [len(prefixes[r])]) for r in rows]
            parts.append(torch.cat(node_states))
            last, picture, index = states[rows[-1]], pictures[rows[-1]], len(prefixes[rows[-1]]) + 1
            ahead = range(index, min(index + target.ahead, target.model.places))
            target.next_states[picture] = target.at(last, picture, ahead), ahead
            start = rows.stop
        return parts

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the pending numbers and those of the accepted nodes."""
        for text, (fresh, tree), path in zip(self.active_rows, self._read, paths, strict=True):
            text += [*fresh, *(int(tree.tokens[node]) for node in path)]


def picture_of(tokens: Sequence[int]) -> int:
    """Return the number of the image that a row's first token stands for."""
    return int(tokens[0]) - MOST_LATENTS
