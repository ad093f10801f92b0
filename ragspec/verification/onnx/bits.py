"""Whether a position has the same bits, however its text is read."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.batch import TreeView
from ragspec.verification.causal import CausalTarget
from ragspec.verification.sequence_cache import SequenceCache

PROMPT = 18
WIDTHS = 17, 8  # of chains: by one attention operator and by the other
CUTS = [320], [257, 63], [7, 250, 46, 17]  # of a longer text
TOGETHER = [35, 1]  # tokens of the forwards of two texts at once
Rows = Sequence[SequenceCache]
Views = Sequence[TreeView]
Names = Sequence[str]
Run = Callable[[Rows, Views, Tensor, Tensor, Names], list[Tensor]]  # see `OnnxTarget.run`
RunTogether = Callable[[Rows, Views, Mapping[str, Tensor], Names], list[Tensor]]


def have_same_bits(target: CausalTarget, run: Run) -> bool:
    """Return whether chains have the bits of their tokens one by one, and long texts in any cut."""
    text = _texts(target.vocab_size, 1, sum(CUTS[0]))
    return _chains_agree(target, text[0].tolist()) and _cuts_agree(run, text)


def batches_agree(vocab_size: int, run: Run, run_together: RunTogether) -> bool:
    """Return whether sequences of a forward have the bits that each has alone."""
    texts, start = _texts(vocab_size, 2, sum(TOGETHER)), 0
    alone, among = ([SequenceCache(sum(TOGETHER) + 2) for _ in texts] for _ in range(2))
    for width in TOGETHER:
        places = torch.arange(start, start + width)[None]
        view, some = TreeView(start, places, places, None), texts[:, places[0]]
        inputs = {"ids": some.reshape(1, -1), "rows": torch.arange(some.numel())}
        (together,) = run_together(among, [view, view], inputs, ("logits",))
        parts = [
            run([row], [view], ids[None], torch.arange(width), ("logits",))[0]
            for row, ids in zip(alone, some, strict=True)
        ]
        if not torch.equal(torch.cat(parts, 1), together):
            return False
        for row in (*alone, *among):
            row.pending += width
        start += width
    return True


def _texts(vocab_size: int, count: int, length: int) -> Tensor:
    return torch.randint(vocab_size, (count, length), generator=torch.Generator().manual_seed(0))


def _chains_agree(target: CausalTarget, text: list[int]) -> bool:
    first, *chain = text[PROMPT : PROMPT + 1 + max(WIDTHS)]
    with target.open(1, PROMPT + 1 + max(WIDTHS)) as session, torch.no_grad():
        session.read_prompts([text[:PROMPT]], 0)
        session.commit([()])
        together = []
        for width in WIDTHS:
            together += session.verify([[first]], [DraftTree.chain(chain[:width], "probe")])
            session.discard_uncommitted()
        for row, token in enumerate((first, *chain)):
            (alone,) = session.verify([[token]], [DraftTree.empty()])
            session.commit([()])
            if not all(torch.equal(alone[0], each[row]) for each in together if row < len(each)):
                return False
    return True


def _cuts_agree(run: Run, text: Tensor) -> bool:
    length, none, read = text.shape[1], torch.empty(0, dtype=torch.int64), list[Tensor]()
    for widths in CUTS:
        row, parts = SequenceCache(length), list[Tensor]()
        for places in torch.split(torch.arange(length)[None], widths, 1):
            view = TreeView(row.extent, places, places, None)
            parts += run([row], [view], text[:, places[0]], none, ("states",))
            row.pending += places.shape[1]
        read.append(torch.cat(parts, 1))
    return all(torch.equal(states, read[0]) for states in read)
