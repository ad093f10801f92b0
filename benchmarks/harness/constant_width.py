"""A target whose forwards all have one shape, so that its text is bit-exact also below float32.

A forward over several positions rounds otherwise than one over a single position: kernels choose
their order of summation by the shape. Here every forward after the prompt has the same number of
positions, with pads behind the draft, and reads keys in whole blocks. Drafts are chains, so that a
token's key lies where plain decoding puts it. Then each position is worked out by the same sums
whatever is drafted, and plain decoding through this target gives the same bits. The price is that
plain decoding pays for the width, too.

Whether a machine's kernels treat all positions of a shape alike is tried when the target is made.
One row at a time: several rows would change the shape when one ends.
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
TRIED = 48  # positions at which a new target is compared with itself


class ConstantWidthTarget(CausalTarget):
    """A causal model whose forwards all cover `width` positions: `Engine(ConstantWidthTarget(m))`.

    Raises InputError for a width below 2, UnsupportedModelError where the same token at another
    place of the same shape gives other logits (some kernels, routed experts).
    """

    bit_exact = True

    def __init__(self, model: Any, width: int = 8) -> None:
        if width < 2:
            raise InputError(f"got a width of {width}; expected 2 or more positions a forward.")
        check_scope(model)
        super().__init__(model)
        self.width = width
        self._expect_alike()

    def open(self, rows: int, capacity: int) -> ConstantWidthSession:
        """Return a session for one row; raises InputError for several."""
        if rows != 1:
            raise InputError(
                f"got {rows} rows; expected one: the shape of a forward would change with them. "
                "Use Engine(.., batch_size=1)."
            )
        return ConstantWidthSession(self, rows, capacity)

    def _expect_alike(self) -> None:
        """Compare chains of drafts with the same tokens one by one, bit for bit."""
        generator = torch.Generator().manual_seed(0)
        sample = torch.randint(self.vocab_size, (TRIED,), generator=generator).tolist()
        for start in (1, self.width + 3):
            with self.open(1, TRIED) as one, self.open(1, TRIED) as many:
                for session in (one, many):
                    session.verify([sample[:start]], [DraftTree.empty()])
                    session.commit([()])
                for first in range(start, TRIED - self.width, self.width):
                    tokens = sample[first : first + self.width]
                    chain = DraftTree.chain(tokens[1:], "probe")
                    together = many.verify([tokens[:1]], [chain])[0]
                    many.commit([range(len(chain))])
                    for place, token in enumerate(tokens):
                        alone = one.verify([[token]], [DraftTree.empty()])[0, 0]
                        one.commit([()])
                        if not torch.equal(alone, together[place]):
                            raise UnsupportedModelError(
                                f"the kernels of {self.device} in {self.dtype} give other bits at "
                                f"place {place} of {self.width} than at the first; expected the "
                                "same. Use float32, or the model as it is (exact up to rounding)."
                            )


class ConstantWidthSession(TreeSession):
    """Tree verification in which trees are chains and all forwards have one shape."""

    def __init__(self, target: ConstantWidthTarget, rows: int, capacity: int) -> None:
        super().__init__(target, rows, capacity)
        self.cache.book.block = BLOCK
        self.width = target.width

    def admit(self, tree: DraftTree, row: int = 0, text: Sequence[int] = ()) -> DraftTree:
        """Return the likeliest path (of draws the first), as long as the shape allows."""
        return keep_paths(limit_depth(super().admit(tree, row, text), self.width - 1), 1)

    def read_prompts(
        self, pending: Sequence[Sequence[int]], k: int
    ) -> tuple[torch.Tensor, list[TopTokens]]:
        """Run one forward and tell nothing of the prompt: logits of it would change the shape."""
        return self.verify(pending, [DraftTree.empty()] * len(pending)), []
