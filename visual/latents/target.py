"""A model of continuous latents as a target: its forward gives states, its law is a head's.

Rows hold the numbers of latents in a table; the trunk reads what they stand for. With guidance a
place has two states, that of the condition and that without one, and the head mixes what it makes
of both at every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragspec.acceptance.target_view import RowView
from ragspec.errors import RuleError
from ragspec.sampling.distribution import TokenLaw
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.stopping import StopState
from ragspec.sampling.transform import RowTransform
from ragspec.target.kv_cache import SlotCache
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.visual.latents.model import LatentModel
from ragspec.visual.latents.sampler import Sampler
from ragspec.visual.latents.schedule import Schedule
from ragspec.visual.latents.table import MOST_LATENTS, LatentTable
from ragspec.visual.models.target import ConditionTable, ImageTarget


class LatentTarget(ImageTarget):
    """A `LatentModel`, ready for `Engine`. Tokens are numbers of `table`.

    schedule: None for the model's own. guidance_scale: see `ImageTarget`. One object serves one
    call: its table keeps every latent that was drawn.
    """

    def __init__(
        self,
        model: LatentModel,
        conditions: ConditionTable,
        guidance_scale: float = 1.0,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(model.trunk, conditions, guidance_scale, codes=MOST_LATENTS)
        config = model.config
        self.latent_model = model
        self.sampler = Sampler(
            model.head, schedule or Schedule(config.steps, config.floor), self.guidance_scale
        )
        told = (self.copies, config.head_width)
        self.table = LatentTable(
            self.sampler.schedule.steps, config.latent_dim, told, model.read.weight
        )

    def code_embeddings(self, codes: torch.Tensor) -> torch.Tensor:
        """Return what the trunk reads for numbers i64 [B, n]: [B, n, H]."""
        latents = self.table.latents[codes.clamp(max=len(self.table) - 1)]
        embedded: torch.Tensor = self.latent_model.read(latents)
        return embedded

    def run(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        cache: SlotCache,
        keep: int | torch.Tensor,
    ) -> torch.Tensor:
        """Return the kept queries' states [C * B, k, H]."""
        states: torch.Tensor = self.model(
            inputs_embeds=embedded,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
            output_hidden_states=True,
        ).hidden_states[0]
        return states

    def _guided(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the states of a place side by side: [C * B, k, H] -> [B, k, C * H]."""
        return torch.cat(logits.chunk(self.copies), dim=-1)

    def open_view(
        self,
        states: torch.Tensor,
        tree: DraftTree,
        law: TokenLaw,
        stop: StopState,
        context: Sequence[int],
        chosen: Sequence[int] | None = None,
        transform: RowTransform | None = None,
    ) -> LatentView:
        """Return what a rule sees of one row's states [N + 1, C * H]."""
        return LatentView(states, tree, law, stop, context, target=self)

    @torch.no_grad()
    def draw(self, views: Sequence[LatentView]) -> None:
        """Draw the target's own latents at every place of all views, all at once."""
        parts = [view.states.reshape(len(view.states), self.copies, -1) for view in views]
        told = self.sampler.told(torch.cat(parts))
        noise = torch.cat([self.noise(view.noise, view.indices) for view in views]).to(told)
        indices = [index for view in views for index in view.indices]
        numbers = self.table.add(self.sampler.draw(told, noise), indices)
        start = 0
        for view in views:
            end = start + len(view.indices)
            view.own = numbers[start:end]
            start = end

    def noise(self, noise: NoiseStream, indices: Sequence[int]) -> torch.Tensor:
        """Return the normal numbers of latents: f64 [n, T + 1, D]."""
        lanes = torch.arange(self.sampler.lanes).expand(len(indices), -1)
        width = self.table.paths.shape[-1]
        return noise.normal_rows(indices, lanes).reshape(len(indices), -1, width)


class LatentView(RowView):
    """What a rule sees of the target at one row: its own latent after every place.

    states [N + 1, C * H]: of the root and the nodes. own: the numbers of the target's own latents,
    drawn at the first question, for all rows of the step at once where they are made together.
    """

    def __init__(
        self,
        states: torch.Tensor,
        tree: DraftTree,
        law: TokenLaw,
        stop: StopState,
        context: Sequence[int],
        *,
        target: LatentTarget,
    ) -> None:
        super().__init__(states, tree, law, stop, context)
        self.states = states
        self.target = target
        self.own: Sequence[int] = ()
        self.indices = [self.index(node) for node in range(ROOT, len(tree))]

    def token(self, node: int) -> int:
        """Return the number of the target's own latent after the node."""
        if not self.own:
            self.target.draw([self])
        return self.own[node + 1]

    def choices(self, nodes: Sequence[int], k: int) -> list[list[int]]:
        """Return the target's own latent after each of the nodes; there is no second choice."""
        return [[self.token(node)] for node in nodes]

    def probabilities(self, node: int) -> torch.Tensor:
        """Raise RuleError: a latent has no table of probabilities."""
        raise RuleError(
            "got a rule over tables of probabilities with a model of continuous latents; expected "
            "one over latents, such as 'near' or 'horizon'."
        )

    def meet(self, views: Sequence[RowView]) -> None:
        """Draw the latents of all rows of a step together."""
        self.target.draw([view for view in views if isinstance(view, LatentView)])
