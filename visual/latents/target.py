"""Models of continuous latents as targets: forwards return states, a head samples from them.

Drafts, sequences and reports hold the numbers of latents in a table; the trunk reads the latents.
With guidance a place has two states, conditional and unconditional, and the head mixes its
predictions of both at every step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.needs import Capabilities, Needs, match
from ragspec.rules.target_view import RowView
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import ROOT
from ragspec.verification.batch import Batch
from ragspec.visual.latents.model import LatentModel
from ragspec.visual.latents.sampler import LatentSample, NoiseSchedule, Sampler, path_noise
from ragspec.visual.models.target import ConditionTable, ImageTarget, run_model

MOST_LATENTS = 1 << 20  # limit of numbers per call; those from here on stand for conditions
_FIRST = 1024


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on one committed latent; latents are numbers of the table.

    Attributes:
        drafted: The draft that was judged there, or None.
        target_number: The target's own latent, sampled at that forward.
        emitted: The committed latent.
    """

    drafted: int | None
    target_number: int
    emitted: int

    @property
    def accepted(self) -> bool:
        """Whether the draft was kept."""
        return self.emitted == self.drafted


class LatentTable:
    """Every latent of a call by number: 0 is the zero latent, the others are added when sampled.

    Heads of several models may sample into one table, which records each latent's sampler.

    Args:
        steps, width: T, and the size D of a latent.
        like: A tensor with the device and dtype of the latents.
    """

    def __init__(self, steps: int, width: int, like: Tensor) -> None:
        self.paths = like.new_zeros(_FIRST, steps + 1, width)
        self.means = like.new_zeros(_FIRST, steps, width)
        kind = torch.promote_types(like.dtype, torch.float32)
        self.deviations = like.new_ones(_FIRST, steps, width, dtype=kind)
        self.conditioning = [like.new_zeros(0, 0)]  # of each latent, [C, width of the head]
        self.indices = [-1]  # generated index that each latent was sampled for
        self.samplers: dict[int, Sampler] = {}  # of each sampled latent, by number
        self.judged: dict[int, Judged] = {}  # the verdicts on committed latents, by number

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def latents(self) -> Tensor:
        """The latents [M, D], standardised, including spare rows at the end."""
        return self.paths[:, 0]

    def add(
        self, sample: LatentSample, indices: Sequence[int], samplers: Sequence[Sampler]
    ) -> range:
        """Store latents, one for each index and its sampler, and return their numbers."""
        numbers = self._numbers(len(indices))
        self.paths[numbers.start : numbers.stop] = sample.path
        self.means[numbers.start : numbers.stop] = sample.means
        self.deviations[numbers.start : numbers.stop] = sample.deviations
        self.conditioning.extend(sample.conditioning)
        self.indices.extend(indices)
        self.samplers.update(zip(numbers, samplers, strict=False))
        return numbers

    def add_latent(self, latent: Tensor) -> int:
        """Store a latent [D] without a path, which is never a draft, and return its number."""
        number = self._numbers(1).start
        self.paths[number, 0] = latent
        self.conditioning.append(self.conditioning[0])
        self.indices.append(-1)
        return number

    def distances(self, judged: Sequence[Judged]) -> Tensor:
        """Return how far committed latents are from the target's own, in deviations: f64 [n]."""
        numbers = [(each.emitted, each.target_number) for each in judged]
        emitted, sampled = self.latents[torch.tensor(numbers).long().reshape(-1, 2)].unbind(1)
        return cast(Tensor, torch.linalg.vector_norm((emitted - sampled).double(), dim=-1).cpu())

    def _numbers(self, count: int) -> range:
        """Return the next numbers and make room for them; raise InputError past the last one."""
        first = len(self)
        if first + count > MOST_LATENTS:
            raise InputError(
                f"got pictures that take over {MOST_LATENTS:,} drawn latents; expected fewer "
                "pictures in a call, or a smaller window."
            )
        size = len(self.paths)
        if first + count > size:
            more = max(size, first + count - size)
            self.paths, self.means, self.deviations = (
                torch.cat([each, each.new_zeros(more, *each.shape[1:])])
                for each in (self.paths, self.means, self.deviations)
            )
        return range(first, first + count)


class LatentDraws:
    """A base of targets over latents: samples the latents of a table, for rules to judge."""

    table: LatentTable  # every latent that was sampled
    sampler: Sampler  # of the target's own latents
    orders: Tensor | None = None  # the places of each image's latents, if not in raster order
    capabilities = Capabilities(latents=True, probabilities=False, owner="a model of latents")
    copies: int

    @property
    def steps(self) -> int:
        """The denoising steps T of a latent."""
        return int(self.sampler.schedule.steps)

    @property
    def open_view(self) -> Callable[..., "LatentView"]:
        """Makes a rule's view of one row's states."""
        return partial(LatentView, target=self)

    def draw(self, views: "Sequence[LatentView]") -> None:
        """Sample the target's own latents at every place of all views, in one batch."""
        requests = [self.latents_to_draw(view) for view in views]
        noise = torch.cat(
            [self.noise(view.noise, each) for view, (_, each) in zip(views, requests, strict=True)]
        )
        indices = [index for _, each in requests for index in each]
        numbers = iter(self.add(torch.cat([states for states, _ in requests]), noise, indices))
        for view, (_, each) in zip(views, requests, strict=True):
            view.target_number = list(islice(numbers, len(each)))

    def latents_to_draw(self, view: "LatentView") -> tuple[Tensor, Sequence[int]]:
        """Return states [n, C * H] and indices of the latents to sample, the view's nodes first."""
        return view.logits, view.indices

    @torch.no_grad()
    def add(self, states: Tensor, noise: Tensor, indices: Sequence[int]) -> range:
        """Sample latents by states [n, C * H] and noise [n, T + 1, D]; return their numbers."""
        conditioning = self.sampler.conditioning(states.reshape(len(states), self.copies, -1))
        latents = self.sampler.draw(conditioning, noise.to(conditioning))
        return self.table.add(latents, indices, [self.sampler] * len(indices))

    def note(self, judged: Judged) -> None:
        """Record a rule's verdict on a latent."""
        self.table.judged[judged.emitted] = judged

    def by_place(self, numbers: Tensor, first: int = 0) -> Tensor:
        """Return latents [B, N, D] by place, 0 for missing ones.

        Args:
            numbers: Of the latents of images from `first` on, in order; i64 [B, N], -1 if missing.
        """
        if self.orders is not None:
            numbers = numbers.gather(1, self.orders[first : first + len(numbers)].argsort(1))
        return self.table.latents[numbers.clamp(min=0)]  # 0 is the zero latent

    def noise(self, noise: NoiseStream, indices: Sequence[int]) -> Tensor:
        """Return the normal numbers f64 [n, T + 1, D] of the latents at n indices."""
        return path_noise(noise, indices, self.steps, self.table.paths.shape[-1])


class LatentTarget(LatentDraws, ImageTarget):
    """A `LatentModel`, ready for `Engine`. Tokens are numbers of `table`.

    One object serves one call, as its table keeps every latent that was sampled.

    Args:
        table: For a draft model, the target's table: rules read how drafts were sampled.
    """

    def __init__(
        self,
        model: LatentModel,
        conditions: ConditionTable,
        guidance_scale: float,
        schedule: NoiseSchedule,
        table: LatentTable | None = None,
    ) -> None:
        super().__init__(model.trunk, conditions, guidance_scale, codes=MOST_LATENTS)
        self.latent_model, width = model, model.config.latent_dim
        self.sampler = Sampler(model.head, schedule, self.guidance_scale)
        self.table = table or LatentTable(self.steps, width, next(model.read.parameters()))
        assert self.table.means.shape[1:] == (self.steps, width)

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """Return the trunk's inputs [B, n, H] for numbers of latents i64 [B, n]."""
        latents = self.table.latents[codes.clamp(max=len(self.table) - 1)]
        return cast(Tensor, self.latent_model.read(latents))

    def run(self, embedded: Tensor, positions: Tensor, batch: Batch, keep: int | Tensor) -> Tensor:
        """Return the kept queries' states [C * B, k, H]."""
        options = {"logits_to_keep": keep, "output_hidden_states": True}
        outputs = run_model(self.model, embedded, positions, batch, **options)
        return torch.as_tensor(outputs.hidden_states[0])

    def _guided(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the states of a place in one batch: [C * B, k, H] -> [B, k, C * H]."""
        return torch.cat(logits.chunk(self.copies), dim=-1)


@dataclass(eq=False, kw_only=True)
class LatentView(RowView):
    """A rule's view of the target at one row: the target's own latent after every place.

    Its `logits` are the states of the root and the nodes, [N + 1, C * H].
    """

    target: LatentDraws

    def __post_init__(self) -> None:
        super().__post_init__()
        self.target_number: Sequence[int] = ()  # of the target's own latents, once sampled
        self.indices = [self.index(node) for node in range(ROOT, len(self.tree))]

    def token(self, node: int) -> int:
        """Return the number of the target's own latent after the node."""
        if not self.target_number:
            self.target.draw([self])
        return self.target_number[node + 1]

    def choices(self, nodes: Sequence[int], k: int) -> list[list[int]]:
        """Return the number of the target's own latent after each node, its only choice."""
        return [[self.token(node)] for node in nodes]

    def probabilities(self, node: int) -> Tensor:
        """Raise RuleError: latents have no table of probabilities."""
        match("the rule", Needs(probabilities=True), LatentDraws.capabilities)
        raise AssertionError("a model of latents offers no probabilities")

    def prepare_batch(self, views: Sequence[RowView]) -> None:
        """Sample the latents of all rows of a step together."""
        self.target.draw([view for view in views if isinstance(view, LatentView)])
