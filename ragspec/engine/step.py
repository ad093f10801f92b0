"""One step of the engine: draft, verify, accept."""

import time
from collections import abc
from dataclasses import dataclass, field, replace
from itertools import repeat

from torch import Tensor

from ragspec.engine.sequence import Sequence, attempt
from ragspec.errors import RuleError
from ragspec.needs import HiddenStates
from ragspec.rules.base import Step, Verdict
from ragspec.rules.target_view import RowView
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import limit_depth


def propose(row: Sequence, rows: int) -> DraftTree:
    """Return a draft within the budget; without memory, the sequence loses its drafter.

    Args:
        rows: Sequences that share the forward.
    """
    count, budget = len(row.context.tokens), row.budget
    if row.drafter is None or budget is None or (allowed := budget.allowance(count, rows)) <= 0:
        return DraftTree.empty()
    try:
        tree = row.drafter.propose(row.context, allowed)
    except Exception as error:
        row.drop_drafter(error)
        return DraftTree.empty()
    if len(row.context.tokens) != count:
        raise RuleError(
            f"the drafter changed its context from {count} to {len(row.context.tokens)} tokens; "
            "expected it unchanged. Copy `context.tokens` before changing them."
        )
    # The target adds a token of its own, so a node at depth `remaining` could never pay.
    return limit_depth(tree, row.context.remaining - 1)


def judge(
    rows: abc.Sequence[Sequence],
    trees: abc.Sequence[DraftTree],
    logits: abc.Sequence[Tensor],
    hidden: abc.Sequence[HiddenStates | None],
    known: abc.Sequence[abc.Sequence[int]] | None = None,
) -> list[tuple[Verdict, RowView] | None]:
    """Return the verdict of each row's rule and the view that it judged; None for failed rows.

    Args:
        logits: The target's logits at root and nodes, of each row [N + 1, V].
        hidden: The hidden states of each row at root and nodes, or None.
        known: The target's own tokens after root and nodes, if they are computed already; empty for
            a row that has none.
    """
    parts = zip(rows, trees, logits, hidden, known or repeat(None), strict=False)
    views = [
        attempt(row, _view, row, tree, scores[: len(tree) + 1], states, chosen)
        for row, tree, scores, states, chosen in parts
    ]
    valid = [view for view in views if view is not None]
    if valid:
        valid[0].prepare_batch(valid)
    judged: list[tuple[Verdict, RowView] | None] = []
    for row, tree, view in zip(rows, trees, views, strict=True):
        verdict = None if view is None else attempt(row, row.rule.judge, tree, view)
        judged.append(None if view is None or verdict is None else (verdict, view))
    return judged


def top_tokens_of(
    rows: abc.Sequence[Sequence], trees: abc.Sequence[DraftTree], logits: abc.Sequence[Tensor]
) -> abc.Sequence[TopTokens | None]:
    """Return the target's best tokens of each row, None if no drafter needs them."""
    k = max(row.needs.top_tokens for row in rows)
    if not k:
        return [None] * len(rows)
    unchanged = not any(row.distribution.processors for row in rows)
    return TopTokens.ranked(logits, k, [len(tree) + 1 for tree in trees], unchanged)


def _view(
    row: Sequence,
    tree: DraftTree,
    logits: Tensor,
    hidden: HiddenStates | None,
    chosen: abc.Sequence[int] | None,
) -> RowView:
    """Return the view of the row's logits [N + 1, V] for its rule."""
    context = row.context.tokens
    if row.transform is not None:
        taps, states = row.transform_taps, None
        if taps and hidden is not None:
            states = hidden.of(taps)[0, : len(tree) + 1]
        row.transform.forward(states, tree, context)
    view = row.parts.target.open_view
    return view(logits, tree, row.distribution, row.stop, context, chosen, row.transform)


def emit(
    row: Sequence, tree: DraftTree, verdict: Verdict, view: RowView, spent: dict[str, float]
) -> Step:
    """Commit the verdict's tokens to the row, up to the one that ends the text."""
    tokens = [int(tree.tokens[node]) for node in verdict.path]
    if verdict.token is not None:
        tokens.append(verdict.token)
    for count, token in enumerate(tokens, start=1):
        if row.stop.push(token):
            tokens = tokens[:count]
            row.finished = time.perf_counter()
            break
    if (top := row.request.logprobs) is not None:
        before = zip((ROOT, *verdict.path), tokens, strict=False)
        row.scored += [view.logprob(node, token, top) for node, token in before]
    row.context.tokens.extend(tokens)
    row.context.remaining -= len(tokens)
    row.pending = tokens[-1:]
    count = len(tokens)
    excess, nll_gap = verdict.excess[:count], verdict.nll_gap[:count]
    step = Step(tree, verdict.path[:count], tuple(tokens), spent, excess=excess, nll_gap=nll_gap)
    row.steps.append(step if tree.q is None else replace(step, tree=replace(tree, q=None)))
    return step


def finish(
    row: Sequence,
    tree: DraftTree,
    verdict: Verdict,
    view: RowView,
    spent: dict[str, float],
    best: TopTokens | None,
    hidden: HiddenStates | None,
) -> None:
    """Emit the verdict's tokens, and let the drafter learn from the step."""
    step = emit(row, tree, verdict, view, spent)
    if row.done or row.drafter is None:
        return
    # View, tokens and states are lent for this call; the steps that a row keeps hold none.
    # Stateful processors and transforms may see visited nodes alone, so they lend no view.
    step.view = None if row.distribution.lazy or row.transform is not None else view
    step.best = best
    if hidden is not None and row.needs.hidden_states:
        step.hidden = hidden.at(slice(len(tree) + 1))
    try:
        row.drafter.observe(step)
    except Exception as error:
        row.drop_drafter(error)
    step.view = step.best = step.hidden = None


@dataclass(slots=True)
class InFlightStep:
    """One forward and the drafts that it verifies.

    Attributes:
        trees: Empty before drafting, or if it failed.
        spent: Milliseconds of its stages so far.
    """

    rows: list[Sequence]
    trees: list[DraftTree] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None  # of its drafts or its launch
