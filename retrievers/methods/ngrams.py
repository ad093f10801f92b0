"""A pool of n-grams by their first token, the freshest first, and a drafter over it.

The context database of Hierarchy Drafting (arXiv 2502.05609) in the paper's own form: a token leads
to at most `guess` (7) n-grams of `level` (5) tokens that begin with it. Deviations: every n-gram of
the committed text is in the pool before the next draft, also after steps that accepted nothing;
lists are read from their fresh end; n-grams with a common prefix share its nodes. Lookahead's
window makes a forward about fifty tokens wider. Instead, verified branches with the target's best
next tokens are added as n-grams, which costs nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, islice, takewhile
from operator import mul

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, Ratio
from ragspec.drafters.method import Method
from ragspec.needs import Needs
from ragspec.rules.base import Step
from ragspec.sampling.settings import checked_count
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import keep_best

LEVEL = 5
GUESS = 7

# Probability that one n-gram of a list holds at a depth once the tokens before have held, and the
# factor from each n-gram of the list to the next. Our own figures, corrected by what is accepted.
HOLDS = (0.4, 0.65, 0.75, 0.8)
FADES = 0.6

_PRIOR = 8.0
_DECAY = 0.98


class NGramPool:
    """For each token, at most `guess` n-grams of `level` tokens that begin with it.

    A full list drops the n-gram that was added, or added again, the longest ago.
    """

    def __init__(self, level: int, guess: int) -> None:
        self.level, self.guess = level, guess
        self._lists: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram of `level` tokens, or make it the freshest of its list."""
        held = self._lists.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        held.pop(rest, None)
        if len(held) >= self.guess:
            del held[next(iter(held))]
        held[rest] = None

    def add_text(self, tokens: Sequence[int]) -> None:
        """Add every n-gram of a text, the last one as the freshest."""
        starts = (islice(tokens, start, None) for start in range(self.level))
        for ngram in zip(*starts, strict=False):
            self.add(ngram)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the n-grams that begin with the token, without it, the freshest first."""
        return list(reversed(self._lists.get(token, ())))


class NGramDrafter(Drafter):
    """Drafts the n-grams that begin with the last token.

    Every text has its own pool of the prompt, the further texts and the output.

    Args:
        level, guess: Sizes of the pool, see `NGramPool`.
        lookahead: The pool also takes n-grams from verified branches.

    Raises:
        InputError: `level` is below 2, or `guess` below 1.
    """

    method = Method(
        "n-grams of the text",
        "Lookahead",
        make=lambda sources: NGramDrafter(lookahead=sources.top_k_feedback),
        colour=0,
        listed=False,
    )
    name = "ngrams"

    def __init__(self, *, level: int = LEVEL, guess: int = GUESS, lookahead: bool = True) -> None:
        self.level = checked_count(level, "level", 2)
        self.guess = checked_count(guess, "guess")
        # The prompt's own n-grams are in its text, so that its best tokens are not needed.
        self.needs = Needs(top_tokens=int(lookahead), texts=True)

    def open(self, request: DraftRequest) -> "NGramSession":
        """Return a session over the text's own pool."""
        return NGramSession(self, request)


class NGramSession(DraftSession):
    """The pool of one text; see `NGramDrafter`."""

    def __init__(self, drafter: NGramDrafter, request: DraftRequest) -> None:
        self._drafter, self._vocab_size = drafter, request.vocab_size
        self._pool = NGramPool(drafter.level, drafter.guess)
        for text in request.texts:
            self._pool.add_text(text.tokens)
        self._followed = 0  # committed tokens in the pool
        self._tail: list[int] = []
        self._holds = [Ratio() for _ in HOLDS]  # by depth

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the n-grams after the last token as one tree, at most `budget` nodes."""
        tokens, size = context.tokens, self._drafter.level - 1
        if len(tokens) > self._followed:
            self._pool.add_text(tokens[max(0, self._followed - size) :])
        self._followed, self._tail = len(tokens), tokens[-size:]
        if budget < 1 or context.remaining < 2:
            return DraftTree.empty()
        return keep_best(self._tree(tokens[-1], context.remaining - 1), budget)

    def observe(self, step: Step) -> None:
        """Learn how often the lists hold, and add n-grams of the verified branches."""
        if not self._tail:
            return
        self._judge(step)
        if step.top is not None:
            self._look_ahead(step, step.top[:, 0].tolist())
        self._tail = [*self._tail, *step.tokens][1 - self._drafter.level :]

    def _tree(self, root: int, deepest: int) -> DraftTree:
        """Merge the n-grams into one tree; a shared node has the sum of their shares."""
        ngrams = self._pool.after(root)
        total = sum(FADES**rank for rank in range(len(ngrams)))
        share = defaultdict[tuple[int, ...], float](float)  # of a node, by its path from the root
        for rank, ngram in enumerate(ngrams):
            path = tuple(takewhile(lambda token: token < self._vocab_size, ngram[:deepest]))
            for depth in range(1, len(path) + 1):
                share[path[:depth]] += FADES**rank / total
        number = {path: node for node, path in enumerate(share)} | {(): ROOT}
        places = (min(level, len(HOLDS) - 1) for level in range(self._drafter.level - 1))
        # The probability that the list holds down to each depth.
        held = [*accumulate((self._holds[at].share(_PRIOR, HOLDS[at]) for at in places), mul)]
        return DraftTree.build(
            [path[-1] for path in share],
            [number[path[:-1]] for path in share],
            self._drafter.name,
            accept_prob=[part * held[len(path) - 1] for path, part in share.items()],
        )

    def _judge(self, step: Step) -> None:
        """Count, by depth, whether an n-gram of the list continued as the target did."""
        live = self._pool.after(self._tail[-1])
        for level, token in enumerate(step.tokens[: self._drafter.level - 1]):
            if not live:
                return
            live = [ngram for ngram in live if ngram[level] == token]
            self._holds[min(level, len(HOLDS) - 1)].learn(1.0, bool(live), _DECAY)

    def _look_ahead(self, step: Step, best: list[int]) -> None:
        """Add, for every verified branch, its last tokens with the target's best next one."""
        size = self._drafter.level - 1
        runs = [tuple(self._tail[-size:])]
        parents, tokens = step.tree.parents.tolist(), step.tree.tokens.tolist()
        for parent, token in zip(parents, tokens, strict=True):
            runs.append((*runs[parent - ROOT], token)[-size:])
        # In reverse: the likeliest branches come first in a tree and must be the freshest.
        for run, token in zip(reversed(runs), reversed(best), strict=True):
            if len(run) == size:
                self._pool.add((*run, token))
