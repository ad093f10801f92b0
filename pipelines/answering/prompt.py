"""The prompt of a question over passages, with the token span of every passage.

A `PromptTemplate` decides the words. This module inserts as many passages as fit, and locates them
in the tokens.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ragspec.drafters.base import SourceText
from ragspec.engine.plain_text import MARK, encode_text, mark_special_tokens
from ragspec.engine.prompts import anchored, well_formed
from ragspec.errors import InputError
from ragspec.pipelines.answering.template import TEMPLATES, PromptTemplate, expect_question, is_chat
from ragspec.retrievers.search.fusion import Hit
from ragspec.trees.draft_tree import LAYOUT
from ragspec.types import Tokenizer

SENTENCE_ENDS = ("", ".", ")", '."', ".)", "?", "!")
Span = tuple[int, int, int, int]
CharSpan = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of T tokens and the position of its passages.

    Attributes:
        hits: The passages of the prompt, in order.
        spans: (start, end, hit, 0) in tokens: prompt tokens start to end are passage text of
            `hits[hit]`, whose own token 0 is at start.
        chars: For every span, the characters of each of its tokens in the passage's text. Passages
            have no spans if the tokenizer returns no offsets.
        layout: The words around quotation and answer that the prompt asks for, to draft from.
        left_out: Passages of the search that did not fit.
        first: Number of the first passage.
    """

    text: str
    token_ids: tuple[int, ...]
    hits: tuple[Hit, ...]
    spans: tuple[Span, ...] = ()
    chars: tuple[tuple[CharSpan, ...], ...] = ()
    layout: tuple[SourceText, ...] = ()
    left_out: tuple[Hit, ...] = ()
    first: int = 1


def build_prompt(
    tokenizer: "Tokenizer | None",
    question: str,
    hits: Sequence[Hit],
    *,
    room: int | None = None,
    template: PromptTemplate = TEMPLATES["evidence"],
) -> Prompt:
    """Return the prompt of a question over passages, best passage first.

    Args:
        room: Most tokens of the prompt. The last passages are left out until it fits; the first
            stays, and the engine refuses a prompt that is still too long.

    Raises:
        InputError: The question is empty, or there are no passages or no tokenizer.
    """
    if tokenizer is None:
        raise InputError("The engine has no tokenizer; expected one with it.")
    question = clean_question(question)
    if not hits:
        raise InputError("The search found no passage for the question; put it in other words.")
    count = len(hits)
    while True:
        passages = passages_of(hits[:count], tokenizer)
        text = template.write(tokenizer, mark_special_tokens(question, tokenizer), passages)
        prompt = lay_out(tokenizer, placed(tokenizer, text, hits[:count]), template)
        excess = 0 if room is None else len(prompt.token_ids) - room
        if excess <= 0 or count == 1:
            return replace(prompt, left_out=tuple(hits[count:]))
        # The ends of the passages show how many fit, so that a prompt of a hundred passages is not
        # written a hundred times.
        ends = {hit: end for _, end, hit, _ in prompt.spans}
        most = ends.get(count - 1, 0) - excess
        fit = [hit + 1 for hit in range(count - 1) if ends.get(hit, most + 1) <= most]
        count = max(fit, default=1)


def clean_question(question: str) -> str:
    """Return a question as tokenizers accept it; raise InputError for no text and a blank one."""
    expect_question(question)
    return well_formed(question)


def lay_out(tokenizer: "Tokenizer", prompt: Prompt, template: PromptTemplate) -> Prompt:
    """Return the prompt with the beginnings of the two lines if its template asks for them.

    Better passages have more copies of their label.
    """
    if not template.two_lines:
        return prompt
    opening, count = template.opening if is_chat(tokenizer) else "", len(prompt.hits)
    labels = [f"{opening} [{k}]" for k in range(1, count + 1) for _ in range(k, count + 1)]
    ids = [encode_text(tokenizer, label).ids for label in labels]
    texts = [anchored(prompt.token_ids, each, LAYOUT) for each in ids]
    endings = [encode_text(tokenizer, f"{ending}\nAnswer:").ids for ending in SENTENCE_ENDS]
    texts += [SourceText(each, LAYOUT) for each in endings]
    return replace(prompt, layout=tuple(text for text in texts if text is not None))


def placed(tokenizer: "Tokenizer", text: str, hits: Sequence[Hit]) -> Prompt:
    """Tokenize the text of a prompt, and locate the passages of `hits` in it, in their order.

    A passage that the template changed has no span.
    """
    # A chat template has already written the special tokens of the beginning.
    encoded = encode_text(tokenizer, text, add_special_tokens=not is_chat(tokenizer))
    text, offsets = encoded.text, encoded.offsets
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    spans, chars, cursor = list[Span](), list[tuple[CharSpan, ...]](), 0
    for number, hit in enumerate(hits):
        # Searched with the line break before it: a title may begin like its passage.
        begin = text.find("\n" + hit.passage.text, cursor) + 1
        if begin == 0:
            continue
        cursor = begin + len(hit.passage.text)
        first, last = bisect_left(starts, begin), bisect_right(ends, cursor)
        if last > first:
            spans.append((first, last, number, 0))
            chars.append(tuple((a - begin, b - begin) for a, b in offsets[first:last]))
    return Prompt(text, encoded.ids, tuple(hits), tuple(spans), tuple(chars))


def passage_first(
    tokenizer: "Tokenizer",
    question: str,
    hit: Hit,
    template: PromptTemplate,
    prefix: Prompt | None = None,
) -> Prompt:
    """Return a prompt over one passage, whose keys and values every question can reuse.

    The part up to the passage's end does not depend on the question. It is tokenized separately;
    `prefix` is that part if it was tokenized before.
    """
    text, end = led_by(tokenizer, question, hit, template)
    if prefix is None:
        # At end 0 the template changed the passage, and no part can be shared.
        prefix = placed(tokenizer, text[: end or len(text)], [hit])
    rest = encode_text(tokenizer, text[end:]).ids if end else ()
    whole = replace(prefix, text=text.replace(MARK, ""), token_ids=(*prefix.token_ids, *rest))
    return lay_out(tokenizer, whole, template)


def led_by(
    tokenizer: "Tokenizer", question: str, hit: Hit, template: PromptTemplate
) -> tuple[str, int]:
    """Return a prompt over one passage, special tokens marked, and where the passage ends.

    The text up to there does not depend on the question. The end is 0 if the template changed the
    passage.
    """
    passages, question = passages_of([hit], tokenizer), clean_question(question)
    text = template.write(tokenizer, mark_special_tokens(question, tokenizer), passages)
    at = text.find("\n" + passages[0][1])
    return text, at + 1 + len(passages[0][1]) if at >= 0 else 0


def passages_of(hits: Sequence[Hit], tokenizer: "Tokenizer") -> list[tuple[str, str]]:
    """Return titles, on one line each, and texts of passages, special tokens marked."""
    passages = [hit.passage for hit in hits]
    titles = [mark_special_tokens(" ".join(each.title.split()), tokenizer) for each in passages]
    texts = [mark_special_tokens(each.text, tokenizer) for each in passages]
    return [*zip(titles, texts, strict=True)]
