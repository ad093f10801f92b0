"""How likely a model holds given texts: one forward over each, nothing drafted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ragspec.verification.causal import CausalTarget

MOST_LOGITS = 1 << 26  # of one forward: numbers, 256 MiB in float32


@torch.inference_mode()
def score_rows(
    target: CausalTarget, rows: Sequence[tuple[list[int], int]], filling: int
) -> Iterator[tuple[float, bool]]:
    """Yield for each row the log-likelihood of its last tokens, and whether greedy has them too.

    rows: the ids of a text, at least one more than are scored, and how many are scored. filling: an
    id to fill shorter rows up with, behind their text, where nothing attends to it. As many rows as
    `MOST_LOGITS` allows go into one forward.
    """
    longest = max(len(ids) for ids, _ in rows) - 1
    fit = max(1, MOST_LOGITS // (longest * target.vocab_size))
    for start in range(0, len(rows), fit):
        part = rows[start : start + fit]
        width = max(len(ids) for ids, _ in part) - 1
        inputs = torch.full((len(part), width), filling)
        for row, (ids, _) in enumerate(part):
            inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        first = min(len(ids) - 1 - scored for ids, scored in part)
        keeps = {"logits_to_keep": width - first} if target.keeps_logits and first < width else {}
        logits = target.model(input_ids=inputs.to(target.device), use_cache=False, **keeps).logits
        for row, (ids, scored) in enumerate(part):
            end = len(ids) - 1 - (first if keeps else 0)
            yield _score(logits[row, end - scored : end], ids[len(ids) - scored :])


def _score(logits: torch.Tensor, ids: list[int]) -> tuple[float, bool]:
    """Return the sum of log-probabilities of ids i64 [n] under logits [n, V], and if they lead."""
    if not ids:
        return 0.0, True
    message = torch.tensor(ids, device=logits.device)
    distributions = logits.float().log_softmax(-1)
    return float(distributions.gather(1, message[:, None]).sum()), bool(
        (logits.argmax(-1) == message).all()
    )
