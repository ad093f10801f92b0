"""Draft heads that draft several tokens in one pass: Medusa, Hydra, DFlash and DSpark.

Medusa (arXiv 2401.10774) predicts the k-th token after the root from the last state alone, Hydra
(2402.05109) also from the drafted tokens before it, and Hydra++ from states that a layer read
first. DFlash (z-lab) reads mask tokens in a block, in which all see each other; its layers attend
to keys and values of the target's states. DSpark adds to a slot's logits a term of the token before
it. Its head of confidence is not used: drafts are ranked as those of other heads.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragspec.drafters.heads.config import HeadConfig
from ragspec.drafters.heads.head import DraftHead, HeadStates, RecurrentHead, decoder_of, norm_like
from ragspec.models.supported import cache_argument
from ragspec.verification.batch import Batch
from ragspec.verification.causal import CausalTarget


class ResidualBlock(nn.Module):
    """Adds SiLU(W x + b) to x, of which a linear map is taken if it is wider."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.shortcut = nn.Identity() if inputs == width else nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., width] of x [..., inputs]."""
        return cast(Tensor, self.shortcut(x) + functional.silu(self.linear(x)))


class SlotRows(nn.ModuleList):
    """The rows of logits of each slot."""

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits [R, K, V] of the states [R, K, H] of the first K slots."""
        pairs = zip(self, states.unbind(1), strict=False)
        return torch.stack([rows(each) for rows, each in pairs], 1)


class MedusaHead(DraftHead):
    """Residual blocks and rows of logits for each slot: Medusa or Hydra."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.blocks = nn.ModuleList()
        for slot in range(config.slots):
            inputs = width + (slot + 1) * config.embedding_size * (config.join == "path")
            sizes = [inputs, *[width] * (config.blocks - 1)]
            self.blocks.append(nn.Sequential(*(ResidualBlock(size, width) for size in sizes)))
        self.outputs = SlotRows(
            nn.Linear(width, config.vocab_size, bias=config.bias) for _ in range(config.slots)
        )
        self.layers = decoder_of(config) if config.prefix else nn.Module()
        self.cache_argument = cache_argument(self.layers)

    def read(self, embedded: Tensor, states: Tensor, batch: Batch) -> HeadStates:
        """Return the states of all slots, of Hydra only the first one; see `DraftHead.read`."""
        from ragspec.verification.model_cache import ModelCache  # imports transformers

        states = states.to(self.dtype)
        if self.config.prefix:
            options = {self.cache_argument: ModelCache(batch), "use_cache": True}
            output = self.layers(inputs_embeds=states, position_ids=batch.positions, **options)
            states = output.last_hidden_state
        last = states[:, -1]
        if self.config.join == "path":
            pair = torch.cat([last, embedded[:, -1].to(last.dtype)], -1)
            return HeadStates(self.blocks[0](pair)[:, None], last)
        return HeadStates(torch.stack([block(last) for block in self.blocks], 1), last)

    def slot_states(
        self, embedded: Tensor, states: Tensor, mask: Tensor | None
    ) -> Iterator[Tensor]:
        """Yield what the rows of logits read in each slot [R, n, H], for a training.

        Place i of slot k belongs to the pass k places before it; the first k places are undefined.

        Args:
            embedded, states: Embeddings of n tokens, and the states before them.
            mask: Embedding of the mask token [1, 1, E].
        """
        n = states.shape[1]
        states = states.to(self.dtype)
        if self.config.prefix:
            states = self.layers(inputs_embeds=states, use_cache=False).last_hidden_state
        for slot, block in enumerate(self.blocks[:n]):
            parts = [states[:, : n - slot]]
            if self.config.join == "path":
                parts += [embedded[:, i : n - slot + i] for i in range(slot + 1)]
            yield functional.pad(block(torch.cat(parts, -1)), (0, 0, slot, 0))

    def rows(self, target: CausalTarget) -> nn.Module | None:
        """Return the rows of logits of the slots; see `DraftHead.rows`."""
        return self.outputs

    def logits_after(
        self, target: CausalTarget, paths: Sequence[Sequence[int]], logits: Tensor, fed: Tensor
    ) -> Tensor:
        """Return the logits [n, V] after n paths; see `DraftHead.logits_after`."""
        if self.config.join == "state":
            return super().logits_after(target, paths, logits, fed)
        result = logits.new_empty(len(paths), logits.shape[-1])
        for length in {len(path) for path in paths}:
            at = [i for i, path in enumerate(paths) if len(path) == length]
            if length == 1:
                result[at] = logits[:1]
                continue
            tokens = torch.tensor([list(paths[i]) for i in at], device=target.device)
            embedded = self.embed(target, tokens).flatten(1).to(fed.dtype)
            pair = torch.cat([fed.expand(len(at), -1), embedded], -1)
            after = self.outputs[length - 1](self.blocks[length - 1](pair))
            result[at] = after[:, : result.shape[1]].to(result.dtype)
        return result


class BlockHead(DraftHead):
    """DFlash, and DSpark with a `markov_rank`."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, layers = config.hidden_size, decoder_of(config)
        self.fc = nn.Linear(len(config.taps) * config.target_size, width, bias=False)
        self.state_norm, self.norm = norm_like(layers.norm, width), layers.norm
        layers.norm = nn.Identity()
        self.layers = layers
        if rank := config.markov_rank:
            self.markov_in = nn.Embedding(config.vocab_size, rank)
            rows = config.draft_vocab_size or config.vocab_size
            self.markov_out = nn.Linear(rank, rows, bias=False)

    def project(self, taps: Tensor) -> Tensor:
        """Return the states whose keys and values are injected; see `DraftHead.project`."""
        return cast(Tensor, self.state_norm(self.fc(taps.to(self.dtype))))

    def read(self, embedded: Tensor, states: Tensor, batch: Batch) -> HeadStates:
        """Return the states of the slots; see `DraftHead.read`.

        The last token and the mask tokens make the block. Its positions follow those of the states.
        """
        x, states = embedded[:, states.shape[1] - 1 :].to(self.dtype), states.to(self.dtype)
        positions = torch.cat([batch.positions, batch.positions[:, -1:] + 1], 1)
        out = self._run(x, states, positions, batch)[:, -self.config.slots :]
        return HeadStates(out, out)

    def slot_states(
        self, embedded: Tensor, states: Tensor, mask: Tensor | None
    ) -> Iterator[Tensor]:
        """Yield the states of a block behind each token; see `MedusaHead.slot_states`."""
        assert mask is not None
        rows, n = states.shape[:2]
        size, places = self.config.masks + 1, torch.arange(n, device=states.device)
        fill = mask.expand(rows, n, size - 1, -1)
        x = torch.cat([embedded[:, :, None], fill], 2).flatten(1, 2).to(self.dtype)
        block = places[:, None] + 1 + torch.arange(size, device=places.device)
        positions, of = torch.cat([places, block.flatten()])[None], places.repeat_interleave(size)
        visible = torch.cat([places <= of[:, None], of == of[:, None]], 1)
        out = self._run(x, states.to(self.dtype), positions, visible=visible)
        out = out.view(rows, n, size, -1)
        for slot in range(min(self.config.slots, n)):
            yield functional.pad(out[:, : n - slot, slot - self.config.slots], (0, 0, slot, 0))

    def logits_after(
        self, target: CausalTarget, paths: Sequence[Sequence[int]], logits: Tensor, fed: Tensor
    ) -> Tensor:
        """Return the logits [n, v] after n paths; see `DraftHead.logits_after`."""
        rows = super().logits_after(target, paths, logits, fed)
        if not self.config.markov_rank:
            return rows
        last = torch.tensor([path[-1] for path in paths], device=target.device)
        added: Tensor = self.markov_out(self.markov_in(last))
        return rows + added.to(rows.dtype)

    def _run(
        self,
        x: Tensor,
        states: Tensor,
        positions: Tensor,
        batch: Batch | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Return the output [R, B, H] after B block tokens, which attend to n states too.

        Args:
            positions: Of the states, then of the block, i64 [1, n + B].
            batch: Has earlier states.
            visible: What the block attends to, bool [B, n + B]; None for all, up to windows.
        """
        tables = self.layers.rotary_emb(x, positions)
        for number, layer in enumerate(self.layers.layers):
            block = layer.input_layernorm(x)
            queries, keys, values = self._project_block(layer.self_attn, block, states, tables)
            if batch is not None:
                keys, values = batch.update(keys, values, number)
                visible = self._visible(number, x.shape[1], keys.shape[2], x.device)
            out = functional.scaled_dot_product_attention(
                queries, keys, values, visible, scale=layer.self_attn.scaling, enable_gqa=True
            )
            x = x + layer.self_attn.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return cast(Tensor, self.norm(x))

    def _project_block(
        self, attention: Any, block: Tensor, states: Tensor, tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries of a block, and keys and values of states and block."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        both, size = torch.cat([states, block], 1), block.shape[1]

        def heads(projection: nn.Module, inputs: Tensor, norm: nn.Module | None) -> Tensor:
            split = projection(inputs).unflatten(-1, (-1, attention.head_dim))
            return cast(Tensor, (split if norm is None else norm(split)).transpose(1, 2))

        norms = dict(attention.named_children())
        queries = heads(attention.q_proj, block, norms.get("q_norm"))
        keys = heads(attention.k_proj, both, norms.get("k_norm"))
        _, keys = apply_rotary_pos_emb(keys, keys, *tables)
        queries, _ = apply_rotary_pos_emb(queries, queries, *(each[:, -size:] for each in tables))
        return queries, keys, heads(attention.v_proj, both, None)

    def _visible(self, number: int, size: int, slots: int, device: torch.device) -> Tensor | None:
        """Return the slots that a block attends to in a layer with a window: bool [B, slots].

        The window counts from the block's first slot, as in the training code of `speculators`.
        """
        settings = self.config.layers
        kinds, window = settings.get("layer_types"), settings.get("sliding_window")
        if not kinds or kinds[number] != "sliding_attention" or not window:
            return None
        places = torch.arange(slots, device=device)
        visible: Tensor = (places >= slots - size - window).expand(size, -1)
        return visible & (places <= places[-size:, None]) if self.config.causal_windows else visible


_KINDS: dict[str, type[DraftHead]] = {"inject": BlockHead, "state": MedusaHead, "path": MedusaHead}


def unset_head(config: HeadConfig) -> DraftHead:
    """Return a head whose weights are to be set by `reset` or from a file."""
    with torch.random.fork_rng(devices=[]):
        return _KINDS.get(config.join, RecurrentHead)(config)
