"""The text of a growing sequence of tokens: its pieces, its stops, and where tokens begin."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ragspec.sampling.decoding import Decodes, Decoding, decoder_of
from ragspec.sampling.settings import TokenLogprob


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token, the character at which it begins in the text, and its part of the text.

    The parts join to the text: a character of several tokens belongs to the last one, and a token
    that a stop string cuts has the part before the cut.
    """

    scored: TokenLogprob
    start: int
    part: str


class TextOutput:
    """The text of tokens that follow a prompt, up to the first stop string.

    It is the decoding of prompt and tokens without that of the prompt, cut at the first stop
    string, however the tokens arrive. The pieces join to it. If the prompt ends inside a character,
    that character is part of the text.

    Args:
        tokenizer: A tokenizer, or a function from token ids to text.
        prompt: Tokens before the text.
        stops: Strings that end the text and never appear in it. One that contains special tokens
            is found even if the text leaves them out.
        placed: Whether to record where tokens begin.

    Attributes:
        starts: The character at which each token begins, and at which the next one will, if
            recorded. A character of several tokens belongs to the last one.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        *,
        placed: bool = False,
    ) -> None:
        decoder = decoder_of(tokenizer)
        self.starts = [0]
        self._tokenizer = tokenizer  # which its decoder does not keep
        self._stops, self._placed = tuple(stops), placed
        self._visible = Decoding(decoder, True, prompt)
        special = tuple(stop for stop in stops if any(each in stop for each in decoder.special))
        plain = tuple(stop for stop in stops if stop not in special)
        self._searches = [(self._visible, plain)]  # texts, and the stops to find in each
        if special:
            self._searches.append((Decoding(decoder, False, prompt), special))
        self._marks: list[tuple[int, int]] = []  # where tokens begin in the two texts
        self._waiting: list[int] = []  # tokens that nobody has asked for
        self._cut: int | None = None
        self._given = 0  # characters returned as pieces

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed."""
        return self._cut is not None

    @property
    def text(self) -> str:
        """The text so far, incomplete characters at its end included."""
        self._decode()
        return self._visible.whole[: self._find() if self._cut is None else self._cut]

    def push(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text, one by one if stop strings or places are searched."""
        if not (self._stops or self._placed):
            self._waiting.extend(tokens)
            return
        visible = self._visible
        for token in tokens:
            for searched, _ in self._searches[1:]:
                self._marks.append((len(searched.text), len(visible.text)))
            stopped = [_push(*search, [token]) for search in self._searches]
            if self._placed:
                self.starts.append(max(self.starts[-1], visible.length))
            if self._cut is None and any(stopped):
                self._cut = self._find()  # a longer stop may begin earlier

    def finish(self) -> bool:
        """End the text, and return whether its last, incomplete part completes a stop string."""
        if self._cut is None:
            self._cut = self._find()
        return self.stopped

    def piece(self, *, ends: bool = False) -> str:
        """Return the text that was not returned before.

        Without `ends`, what later tokens may change and what may begin a stop string is held back.
        """
        if ends:
            text = self.text
        else:
            self._decode()
            text = self._visible.text[: self._final() if self._cut is None else self._cut]
        piece, self._given = text[self._given :], max(self._given, len(text))
        return piece

    def completes_stop(self, tokens: Sequence[int]) -> bool:
        """Return whether a stop string would be complete after these tokens."""
        if not self._stops or self.stopped:
            return self.stopped
        return any([_push(text.fork(), s, tokens) for text, s in self._searches if s])

    def place(
        self, scored: Sequence[TokenLogprob], text: str, reason: str | None = None, first: int = 0
    ) -> list[PlacedToken]:
        """Return the recorded tokens from number `first` on that end in the first part of the text.

        Of a whole text they are all, but those of a stop string that begin after the cut.

        Args:
            scored: The log-probabilities of all tokens so far.
            text: The first part: all pieces so far.
            reason: The finish reason of the text if it is whole.
        """
        starts, end = self.starts, len(text)
        if reason is None:
            count = bisect_right(starts, end, 1) - 1
            end = starts[count]
        elif reason == "stop" and starts[-1] > end:  # a stop string cut the text
            count = bisect_left(starts, end)
        else:
            count = len(scored)
        tokens = zip(scored[first:count], pairwise([*starts[first:count], end]), strict=True)
        return [PlacedToken(token, start, text[start:end]) for token, (start, end) in tokens]

    def _decode(self) -> None:
        if self._waiting:
            self._visible.push(self._waiting)
            self._waiting = []

    def _find(self) -> int | None:
        """Return where the first stop string begins, in characters of the text that is shown."""
        cuts = []
        for searched, stops in self._searches:
            text = searched.whole if stops else ""
            places = (text.find(stop) for stop in stops)
            cuts += [self._to_visible(searched, place) for place in places if place >= 0]
        return min(cuts, default=None)

    def _final(self) -> int:
        """Return how many characters of the text no later token can change."""
        ends = []
        for searched, stops in self._searches:
            text, held = searched.text, 0
            for stop in stops:
                sizes = range(min(len(stop) - 1, len(text)), held, -1)
                held = next((size for size in sizes if text.endswith(stop[:size])), held)
            ends.append(self._to_visible(searched, len(text) - held))
        return min(ends)

    def _to_visible(self, searched: Decoding, place: int) -> int:
        """Return the character of the visible text that stands at one of the searched text."""
        if searched is self._visible or not self._marks:
            return place
        at = max(0, bisect_right(self._marks, place, key=lambda mark: mark[0]) - 1)
        end = len(self._visible.whole) if at + 1 == len(self._marks) else self._marks[at + 1][1]
        return min(self._marks[at][1] + place - self._marks[at][0], end)


def _push(searched: Decoding, stops: Sequence[str], tokens: Sequence[int]) -> bool:
    """Add tokens to a text, and return whether one of the stop strings ends in them."""
    before = len(searched.text)
    searched.push(tokens)
    if not stops:
        return False
    new = searched.text[max(0, before + 1 - max(map(len, stops))) :]
    return any([stop in new for stop in stops])
