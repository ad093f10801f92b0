"""A model of continuous latents as a target: forwards give states, a head distributions.

Rows hold the numbers of latents in a table; the trunk reads what they stand for. With guidance a
place has two states, that of the condition and that without one, and the head mixes what it makes
of both at every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragspec.drafters.model.cache import DraftCache
from ragspec.errors import InputError, RuleError
from ragspec.rules.target_view import RowView
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.stopping import StopState
from ragspec.sampling.transform import RowTransform
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.verification.kv_cache import SlotCache
from ragspec.visual.latents.model import LatentModel
from ragspec.visual.latents.sampler import NoiseSchedule, Sampler
from ragspec.visual.latents.table import MOST_LATENTS, LatentTable
from ragspec.visual.models.target import ConditionTable, ImageTarget


class LatentDraws:
    """What all targets over latents share: they draw the latents of a table, for rules to judge.

    table: every latent that was drawn. sampler: how the target's own are.
    """

    table: LatentTable
    sampler: Sampler
    copies: int
    view: type[LatentView]  # what a rule sees of a row

    @property
    def steps(self) -> int:
        """The steps T in which a latent is drawn."""
        return int(self.sampler.schedule.steps)

    def open_view(
        self,
        states: Tensor,
        tree: DraftTree,
        distribution: TokenDistribution,
        stop: StopState,
        context: Sequence[int],
        chosen: Sequence[int] | None = None,
        transform: RowTransform | None = None,
    ) -> LatentView:
        """Return what a rule sees of one row's states [N + 1, C * H]."""
        return self.view(states, tree, distribution, stop, context, target=self)

    def draw(self, views: Sequence[LatentView]) -> None:
        """Draw the target's own latents at every place of all views, all at once."""
        requests = [self.latents_to_draw(view) for view in views]
        noise = torch.cat(
            [self.noise(view.noise, each) for view, (_, each) in zip(views, requests, strict=True)]
        )
        indices = [index for _, each in requests for index in each]
        numbers = self.add(torch.cat([states for states, _ in requests]), noise, indices)
        start = 0
        for view, (_, each) in zip(views, requests, strict=True):
            view.target_number = numbers[start : start + len(each)]
            start += len(each)

    def latents_to_draw(self, view: LatentView) -> tuple[Tensor, Sequence[int]]:
        """Return states [n, C * H] and indices of what is drawn for a view, its nodes' first."""
        return view.states, view.indices

    @torch.no_grad()
    def add(self, states: Tensor, noise: Tensor, indices: Sequence[int]) -> range:
        """Draw latents in states [n, C * H] with noise [n, T + 1, D]; return their numbers."""
        conditioning = self.sampler.conditioning(states.reshape(len(states), self.copies, -1))
        latents = self.sampler.draw(conditioning, noise.to(conditioning))
        return self.table.add(latents, indices, [self.sampler] * len(indices))

    def noise(self, noise: NoiseStream, indices: Sequence[int]) -> Tensor:
        """Return the normal numbers of latents: f64 [n, T + 1, D]."""
        lanes = torch.arange(self.sampler.lanes).expand(len(indices), -1)
        width = self.table.paths.shape[-1]
        return noise.normal_rows(indices, lanes).reshape(len(indices), -1, width)


def expect_steps(table: LatentTable, steps: int, width: int) -> None:
    """Raise InputError for a table of latents of another width, or in another number of steps."""
    shape = table.means.shape
    if shape[1:] != (steps, width):
        raise InputError(
            f"got latents of {width} numbers in {steps} steps; expected {shape[2]} in "
            f"{shape[1]}, as the target's. Draft with a model of the same latents, on the "
            "target's schedule."
        )


class LatentTarget(LatentDraws, ImageTarget):
    """A `LatentModel`, ready for `Engine`. Tokens are numbers of `table`.

    schedule: None for the model's own. guidance_scale: see `ImageTarget`. One object serves one
    call: its table keeps every latent that was drawn. table: of the target that a draft model draws
    for, as its rules ask how drafts were drawn. Raises InputError for a table of latents of another
    width, or in another number of steps.
    """

    def __init__(
        self,
        model: LatentModel,
        conditions: ConditionTable,
        guidance_scale: float = 1.0,
        schedule: NoiseSchedule | None = None,
        table: LatentTable | None = None,
    ) -> None:
        super().__init__(model.trunk, conditions, guidance_scale, codes=MOST_LATENTS)
        config = model.config
        self.latent_model = model
        self.view = LatentView
        self.sampler = self.open_sampler(schedule or NoiseSchedule(config.steps, config.floor))
        steps, width = self.sampler.schedule.steps, config.latent_dim
        spread = self.sampler.spread
        like = next(model.read.parameters())
        self.table = table or LatentTable(steps, width, like, spread)
        expect_steps(self.table, steps, width)

    def open_sampler(self, schedule: NoiseSchedule) -> Sampler:
        """Return what draws latents by the model's head."""
        return Sampler(self.latent_model.head, schedule, self.guidance_scale)

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """Return what the trunk reads for numbers i64 [B, n]: [B, n, H]."""
        latents = self.table.latents[codes.clamp(max=len(self.table) - 1)]
        embedded: Tensor = self.latent_model.read(latents)
        return embedded

    def run(
        self, embedded: Tensor, positions: Tensor, cache: SlotCache, keep: int | Tensor
    ) -> Tensor:
        """Return the kept queries' states [C * B, k, H]."""
        states: Tensor = self.model(
            inputs_embeds=embedded,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
            output_hidden_states=True,
        ).hidden_states[0]
        return states

    def _guided(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the states of a place in one batch: [C * B, k, H] -> [B, k, C * H]."""
        return torch.cat(logits.chunk(self.copies), dim=-1)

    def draft_cache(self, capacity: int) -> DraftCache:
        """Return what reads a text for drafts of it, with room for so many tokens at first."""
        return DraftCache(self, self.copies * int(self.model.config.hidden_size), capacity)


class LatentView(RowView):
    """What a rule sees of the target at one row: its own latent after every place.

    states [N + 1, C * H]: of the root and the nodes. current: the numbers of the target's own
    latents, drawn at the first question, for all rows of the step at once where they are made
    together.
    """

    def __init__(
        self,
        states: Tensor,
        tree: DraftTree,
        distribution: TokenDistribution,
        stop: StopState,
        context: Sequence[int],
        *,
        target: LatentDraws,
    ) -> None:
        super().__init__(states, tree, distribution, stop, context)
        self.states = states
        self.target = target
        self.target_number: Sequence[int] = ()
        self.indices = [self.index(node) for node in range(ROOT, len(tree))]

    def token(self, node: int) -> int:
        """Return the number of the target's own latent after the node."""
        if not self.target_number:
            self.target.draw([self])
        return self.target_number[node + 1]

    def choices(self, nodes: Sequence[int], k: int) -> list[list[int]]:
        """Return the target's own latent after each of the nodes; there is no second choice."""
        return [[self.token(node)] for node in nodes]

    def probabilities(self, node: int) -> Tensor:
        """Raise RuleError: a latent has no table of probabilities."""
        raise RuleError(
            "got a rule over tables of probabilities with a model of continuous latents; expected "
            "one over latents, such as 'near' or 'horizon'."
        )

    def prepare_batch(self, views: Sequence[RowView]) -> None:
        """Draw the latents of all rows of a step together."""
        self.target.draw([view for view in views if isinstance(view, LatentView)])
