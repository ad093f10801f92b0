"""The online suffix automaton: every substring of a growing token text, amortised O(1) a token.

After Blumer et al. 1985 ("The smallest automaton recognizing the subwords of a text"); its use for
drafting follows SAM-Decoding (arXiv 2411.10666). Deviations:
- One automaton holds several texts, split by separator ids that occur once. No match crosses one.
- No match state is advanced beside the automaton: the longest suffix that occurred before is the
  suffix link of the newest state.
- Each state has its count and its latest end.

The states are stored in parallel integer lists. Most states have one outgoing edge, stored in two
of the lists. The few further edges are in a dictionary by state.
"""

from collections.abc import Iterator, Sequence

from ragspec.errors import InputError

ROOT_STATE = 0
# If a text repeats one token, the chain of suffix links is as long as the text. Counts and ends of
# the shorter suffixes beyond this many links may then lag; the matches themselves stay exact.
MAX_LINKS = 32
_NONE = -1


class SuffixAutomaton:
    """All substrings of the tokens so far, with counts and latest ends.

    State 0 is the empty string. A state stands for the substrings that end at the same places;
    `length[s]` is the longest of them, `link[s]` the longest suffix that ends at more places.
    `count[s]` and `latest[s]` cover the ends before the newest token, so the newest suffix never
    matches itself. `cited[s]` is the latest end inside a document, -1 without one.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise InputError(f"vocab_size is {vocab_size}; expected at least 1.")
        self.vocab_size = vocab_size
        self.tokens: list[int] = []
        self.length = [0]
        self.link = [_NONE]
        self.count = [0]
        self.latest = [_NONE]
        self.cited = [_NONE]
        self.first_token = [_NONE]
        self.first_target = [_NONE]
        self.more: dict[int, dict[int, int]] = {}
        self._last = ROOT_STATE
        self._separator = vocab_size
        self._last_is_document = False

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int], document: Sequence[bool] | bool = False) -> None:
        """Append tokens; `document` says, for all or for each, whether a document has them."""
        marks = [document] * len(tokens) if isinstance(document, bool) else document
        for token, mark in zip(tokens, marks, strict=True):
            self._count_newest()
            self._append(token)
            self._last_is_document = mark

    def separate(self) -> None:
        """End the current text: no match and no continuation crosses this border."""
        self.extend([self._separator])
        self._separator += 1

    def match(self) -> int:
        """Return the state of the longest suffix that also ends earlier (0: not even one token)."""
        return max(self.link[self._last], ROOT_STATE)

    def children(self, state: int) -> Iterator[tuple[int, int]]:
        """Yield (token, state) for every token that followed, without separators."""
        first = self.first_token[state]
        if _NONE < first < self.vocab_size:
            yield first, self.first_target[state]
        for token, target in self.more.get(state, {}).items():
            if token < self.vocab_size:
                yield token, target

    def _count_newest(self) -> None:
        """Count the end of the newest token in its suffixes, now that a token follows it."""
        state, end = self._last, len(self.tokens) - 1
        count, latest, link = self.count, self.latest, self.link
        cited = self.cited if self._last_is_document else None
        for _ in range(MAX_LINKS):
            if state <= ROOT_STATE:
                break
            count[state] += 1
            latest[state] = end
            if cited is not None:
                cited[state] = end
            state = link[state]
        self._last_is_document = False

    def _append(self, token: int) -> None:
        first_token, first_target, more = self.first_token, self.first_target, self.more
        state, link = self._last, self.link
        newest = self._new_state(self.length[state] + 1, ROOT_STATE)
        first_token[state], first_target[state] = token, newest
        self._last = newest
        self.tokens.append(token)
        state = link[state]
        while state >= 0:
            if first_token[state] == token:
                target = first_target[state]
                break
            further = more.get(state)
            if further is None:
                more[state] = {token: newest}
            else:
                target = further.get(token, _NONE)
                if target >= 0:
                    break
                further[token] = newest
            state = link[state]
        else:
            return
        if self.length[target] != self.length[state] + 1:
            target = self._split(state, token, target)
        link[newest] = target

    def _split(self, state: int, token: int, target: int) -> int:
        """Split off the suffixes of `target` that now end at one more place; return their state."""
        first_token, first_target, more = self.first_token, self.first_target, self.more
        half = self._new_state(self.length[state] + 1, self.link[target])
        for values in (self.count, self.latest, self.cited, first_token, first_target):
            values[half] = values[target]
        if target in more:
            more[half] = dict(more[target])
        self.link[target] = half
        while state >= 0:
            if first_token[state] == token:
                if first_target[state] != target:
                    break
                first_target[state] = half
            else:
                further = more.get(state)
                if further is None or further.get(token) != target:
                    break
                further[token] = half
            state = self.link[state]
        return half

    def _new_state(self, length: int, link: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.count.append(0)
        self.latest.append(_NONE)
        self.cited.append(_NONE)
        self.first_token.append(_NONE)
        self.first_target.append(_NONE)
        return len(self.length) - 1
