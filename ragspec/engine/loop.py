"""The one loop: draft, verify, judge, commit, emit.

It knows rows of token ids, a target session and a rule. It refuses to know text, documents,
pixels and what a drafter does to arrive at its tree.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ragspec.acceptance.base import Rule, Step, Verdict, open_rule
from ragspec.acceptance.target_view import RowView, choose_together
from ragspec.drafters.base import Prefill, tell_prefill
from ragspec.engine.rows import Row
from ragspec.errors import UnsupportedModelError
from ragspec.models.device import without_autograd
from ragspec.sampling.top_tokens import Tops
from ragspec.target.base import KeepsHidden, ReadsPrompts, TargetSession
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import limit_depth


@dataclass(slots=True)
class Emission:
    """What one pass of the loop gave one row."""

    row: Row
    step: Step


def decode(
    session: TargetSession, rows: Sequence[Row], prompts: Sequence[int], rule: Rule
) -> Iterator[list[Emission]]:
    """Yield what each pass emits until every row is done; abandon it to stop early.

    prompts: for each row the number of the prompt that it continues. Rows of one prompt follow
    each other; the first of them brings the prompt in `pending`, and they share its prefill.
    """
    for row in rows:
        row.rule = open_rule(rule)
    if any(row.reads_hidden for row in rows):
        _keep_hidden(session, rows)
    if not _resumed(rows) and not rows[0].done:
        yield _prefill(session, rows, prompts)
    live = _unfinished(session, rows)
    while live:
        yield _advance(session, live)
        live = _unfinished(session, live)


def _keep_hidden(session: TargetSession, rows: Sequence[Row]) -> None:
    """Let the session keep hidden states; raises UnsupportedModelError where a law needs them."""
    if isinstance(session, KeepsHidden):
        session.keep_hidden()
    elif any(row.transform_reads for row in rows):
        raise UnsupportedModelError(
            "this model's last hidden states cannot be read, which the transform of its law needs; "
            "expected a model that verifies trees or chains. Leave transform out."
        )


def _resumed(rows: Sequence[Row]) -> bool:
    """Tell whether all but the root of a text that goes on was read before: it may be drafted for.

    A drafter that learns from hidden states still wants those of the root.
    """
    first = rows[0]
    return first.stop.count > 0 and len(first.pending) == 1 and not first.hidden


@without_autograd
def _unfinished(session: TargetSession, rows: Sequence[Row]) -> list[Row]:
    """Return the rows that go on, and let the session keep no others."""
    kept = [i for i, row in enumerate(rows) if not row.done]
    if 0 < len(kept) < len(rows):
        session.select(kept)
    return [rows[i] for i in kept]


@without_autograd
def _prefill(session: TargetSession, rows: Sequence[Row], prompts: Sequence[int]) -> list[Emission]:
    """Read the prompts in one forward, which also yields every row's first token."""
    firsts = [i for i, prompt in enumerate(prompts) if i == 0 or prompts[i - 1] != prompt]
    empty = [DraftTree.empty()] * len(rows)
    logits, tops = _read(session, [rows[i] for i in firsts])
    hidden = _hidden(session, [rows[i] for i in firsts])
    session.commit([() for _ in firsts])
    for row, prompt in zip(rows, prompts, strict=True):
        _tell(row, tops[prompt] if tops else None, hidden[prompt])
    if len(firsts) < len(rows):
        session.select(prompts)
        logits = logits[torch.tensor(list(prompts), device=logits.device)]
    ends = [None if (states := hidden[prompt]) is None else states[:, -1:] for prompt in prompts]
    judged = _judge(rows, empty, logits, ends)
    # From the row's start: opening drafters (an index of the prompt, a draft model's own
    # prefill) is work on the prompt too.
    spent = 1000 * (time.perf_counter() - rows[0].started)
    emissions = []
    for row, (verdict, _) in zip(rows, judged, strict=True):
        step = _emit(row, DraftTree.empty(), verdict, {"prefill": spent})
        row.report.prefill(spent)
        emissions.append(Emission(row, step))
    return emissions


def _read(session: TargetSession, rows: Sequence[Row]) -> tuple[torch.Tensor, list[Tops]]:
    """Read the rows' prompts: the logits after them [B, 1, V] and, if wanted, the best tokens."""
    pending = [row.pending for row in rows]
    k = max(row.top if row.reads_prompt else 0 for row in rows)
    if (k or any(row.hidden for row in rows)) and isinstance(session, ReadsPrompts):
        return session.read_prompts(pending, k)
    return session.verify(pending, [DraftTree.empty()] * len(rows)), []


def _hidden(session: TargetSession, rows: Sequence[Row]) -> Sequence[torch.Tensor | None]:
    """Return the hidden states of the last forward, row by row; None where none are kept."""
    wanted = any(row.reads_hidden for row in rows)  # first: to ask a protocol takes 0.1 ms
    kept = session.hidden if wanted and isinstance(session, KeepsHidden) else []
    return kept or [None] * len(rows)


def _tell(row: Row, best: Tops | None, hidden: torch.Tensor | None) -> None:
    """Tell the row's drafter what the prefill knew of the prompt's last tokens."""
    told = len(best) if best is not None else 0 if hidden is None else hidden.shape[1]
    if row.drafter is not None and told:
        tokens = np.asarray(row.context.tokens[-told:], dtype=np.int64)
        reads = row.top > 0 and row.reads_prompt
        tell_prefill(row.drafter, Prefill(tokens, best, hidden), reads, row.hidden)


@without_autograd
def _advance(session: TargetSession, rows: Sequence[Row]) -> list[Emission]:
    """Take one step in every row."""
    began = time.perf_counter()
    trees = [session.admit(_draft(row), i, row.context.tokens) for i, row in enumerate(rows)]
    drafted = time.perf_counter()
    logits = session.verify([row.pending for row in rows], trees)
    k = max(row.top for row in rows)
    kept = not any(row.law.processors for row in rows)
    tops = Tops.ranked(logits, k, [len(tree) + 1 for tree in trees], kept) if k else None
    hidden = _hidden(session, rows)
    judged = _judge(rows, trees, logits, hidden)
    verified = time.perf_counter()
    session.commit([verdict.path for verdict, _ in judged])
    committed = time.perf_counter()
    spent = {
        "draft": 1000 * (drafted - began),
        "verify": 1000 * (verified - drafted),
        "commit": 1000 * (committed - verified),
    }
    emissions = []
    for i, (row, tree, (verdict, view)) in enumerate(zip(rows, trees, judged, strict=True)):
        step = _emit(row, tree, verdict, dict(spent))
        top, states = None if tops is None else tops[i], hidden[i]
        _learn(row, step, view, top, None if states is None else states[:, : len(tree) + 1])
        emissions.append(Emission(row, step))
    host = 1000 * (time.perf_counter() - committed)
    for emission in emissions:
        emission.step.milliseconds["host"] = host
        emission.row.report.step(emission.step)
    return emissions


def _draft(row: Row) -> DraftTree:
    """Ask the row's drafter for as much as its budget allows."""
    if row.drafter is None or row.budget is None:
        return DraftTree.empty()
    length = len(row.context.tokens)
    allowed = row.budget.allowance(length)
    if allowed <= 0:
        return DraftTree.empty()
    tree = row.drafter.propose(row.context, allowed)
    # The target adds a token of its own, so a node at depth `remaining` could never pay.
    return row.budget.fit(limit_depth(tree, row.context.remaining - 1), length)


def _judge(
    rows: Sequence[Row],
    trees: Sequence[DraftTree],
    logits: torch.Tensor,
    hidden: Sequence[torch.Tensor | None],
) -> list[tuple[Verdict, RowView]]:
    """Let the rules of the rows decide and return what they saw, too.

    logits [B, N + 1, V]. hidden: of each row [copies, N + 1, H], where they are kept.
    """
    parts = [logits[i, : len(tree) + 1] for i, tree in enumerate(trees)]
    laws = [row.law for row in rows]
    contexts = [row.context.tokens for row in rows]
    apart = any(row.transform is not None or row.open_view is not RowView for row in rows)
    together = None if apart else choose_together(parts, trees, laws, contexts)
    views = []
    for i, row in enumerate(rows):
        chosen, states = None if together is None else together[i], hidden[i]
        if row.transform is not None:
            own = None if states is None else states[0, : len(trees[i]) + 1]
            row.transform.forward(own, trees[i], contexts[i])
        law, stop = row.law, row.stop
        views.append(
            row.open_view(parts[i], trees[i], law, stop, contexts[i], chosen, row.transform)
        )
    views[0].meet(views)
    judged = []
    for i, (row, view) in enumerate(zip(rows, views, strict=True)):
        verdict = row.rule.judge(trees[i], view)
        if row.logprobs is not None:
            _score(row, trees[i], verdict, view)
        judged.append((verdict, view))
    return judged


def _score(row: Row, tree: DraftTree, verdict: Verdict, view: RowView) -> None:
    """Keep the log-probabilities of the tokens that the verdict emits."""
    top = row.logprobs or 0
    before = ROOT
    for node in verdict.path:
        row.scored.append(view.logprob(before, int(tree.tokens[node]), top))
        before = node
    if verdict.token is not None:
        row.scored.append(view.logprob(before, verdict.token, top))


def _emit(row: Row, tree: DraftTree, verdict: Verdict, spent: dict[str, float]) -> Step:
    """Commit the verdict's tokens to the row, up to the one that ends the text."""
    tokens = [int(tree.tokens[node]) for node in verdict.path]
    if verdict.token is not None:
        tokens.append(verdict.token)
    for count, token in enumerate(tokens, start=1):
        if row.stop.push(token):
            tokens = tokens[:count]
            row.finished = time.perf_counter()
            break
    row.context.tokens.extend(tokens)
    row.context.remaining -= len(tokens)
    del row.scored[row.stop.fresh :]  # of accepted tokens behind the one that ended the text
    row.pending = tokens[-1:]
    count = len(tokens)
    excess, surprise = verdict.excess[:count], verdict.surprise[:count]
    step = Step(tree, verdict.path[:count], tuple(tokens), spent, excess=excess, surprise=surprise)
    row.report.label = row.label  # may depend on the kinds of draft that the rule met
    row.steps.append(step if tree.q is None else replace(step, tree=replace(tree, q=None)))
    return step


def _learn(
    row: Row, step: Step, view: RowView, best: Tops | None, hidden: torch.Tensor | None
) -> None:
    """Tell drafter and budget what came of the step; a finished row has no use for it."""
    if row.done:
        return
    if row.drafter is not None:
        # Lent: the steps that a row keeps hold none of it. Processors with a memory may be asked
        # about nothing but what the rule visited, nor may transforms, so their view is kept back.
        step.view = None if row.law.lazy or row.transform is not None else view
        step.best, step.hidden = best, hidden if row.hidden else None
        row.drafter.observe(step)
        step.view = step.best = step.hidden = None
    if row.budget is not None:
        row.budget.observe(step, len(row.context.tokens))
