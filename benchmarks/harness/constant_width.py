"""A target whose forwards all have one shape, so that its text is bit-exact also below float32.

Kernels choose their order of summation by the shape, so a forward over several positions rounds
otherwise than one over a single position. Here every forward after the prompt has the same number
of positions, with padding behind the draft, and reads keys in whole blocks. Drafts are chains, so
that a token's key has the same slot as in plain decoding. The same sums then compute each position
for any draft, and plain decoding through this target gives the same bits. Plain decoding pays for
the width, too.

The constructor tests whether the kernels treat all positions of a shape alike. The target takes one
sequence at a time, since the end of one of several would change the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.supported import check_scope
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_paths, limit_depth
from ragspec.verification.causal import CausalTarget, TreeSession

BLOCK = 512  # keys that attention kernels take at once
TEST_LENGTH = 48  # positions at which a new target is compared with itself


class ConstantWidthTarget(CausalTarget):
    """A causal model whose forwards all cover `width` positions: `Engine(ConstantWidthTarget(m))`.

    Args:
        model: Causal model of transformers.
        width: Positions of a forward.

    Raises:
        InputError: The width is below 2.
        UnsupportedModelError: A token gives other logits at another position of the same shape, as
            with some kernels and with routed experts.
    """

    bit_exact = True

    def __init__(self, model: Any, width: int = 8) -> None:
        if width < 2:
            raise InputError(f"Expected width of at least 2 positions, got {width}. Choose more.")
        check_scope(model)
        super().__init__(model)
        self.width = width
        self._check_positions()

    def open(self, rows: int, capacity: int) -> ConstantWidthSession:
        """Return a session for one sequence; raises InputError for several."""
        if rows != 1:
            raise InputError(
                f"Expected one sequence, got {rows}, which change the shape of forwards. "
                "Use Engine(.., batch_size=1)."
            )
        return ConstantWidthSession(self, rows, capacity)

    def _check_positions(self) -> None:
        """Compare chains of drafts with the same tokens one by one, bit for bit."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (TEST_LENGTH,), generator=generator).tolist()
        for start in (1, self.width + 3):
            with self.open(1, TEST_LENGTH) as one, self.open(1, TEST_LENGTH) as many:
                for session in (one, many):
                    session.verify([ids[:start]], [DraftTree.empty()])
                    session.commit([()])
                for first in range(start, TEST_LENGTH - self.width, self.width):
                    tokens = ids[first : first + self.width]
                    chain = DraftTree.chain(tokens[1:], "probe")
                    together = many.verify([tokens[:1]], [chain])[0]
                    many.commit([range(len(chain))])
                    for place, token in enumerate(tokens):
                        alone = one.verify([[token]], [DraftTree.empty()])[0, 0]
                        one.commit([()])
                        if not torch.equal(alone, together[place]):
                            raise UnsupportedModelError(
                                f"Expected the same bits at all {self.width} positions, got other "
                                f"ones at {place} ({self.device}, {self.dtype}). Use float32, or "
                                "the model without a constant width (exact up to rounding)."
                            )


class ConstantWidthSession(TreeSession):
    """Verification of chains in which all forwards have one shape."""

    def __init__(self, target: ConstantWidthTarget, rows: int, capacity: int) -> None:
        super().__init__(target, rows, capacity)
        self.cache.book.block = BLOCK
        self.width = target.width

    def trim_draft(self, tree: DraftTree, row: int = 0, text: Sequence[int] = ()) -> DraftTree:
        """Return the most probable path (the first of sampled ones), cut to the width."""
        return keep_paths(limit_depth(super().trim_draft(tree, row, text), self.width - 1), 1)

    def read_prompts(
        self, pending: Sequence[Sequence[int]], k: int
    ) -> tuple[torch.Tensor, list[TopTokens]]:
        """Run one forward; return no top tokens, since logits of the prompt change the shape."""
        return self.verify(pending, [DraftTree.empty()] * len(pending)), []
