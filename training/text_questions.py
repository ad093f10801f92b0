"""Questions made from a sentence by templates, for the question-answering part of the mix.

Each question keeps some of the sentence's words, changed and reordered, so that a model learns to
find a sentence by its words; the answer is a span of the sentence.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_STOPWORDS = (
    "a an the this that these those it its they them their he she his her him we us our you your i "
    "my me of in on at by for with from to into onto over under as is are was were be been being "
    "has have had do does did can could will would shall should may might must not no nor and or "
    "but if then than so such which who whom whose what when where why how there here also only "
    "very more most some any all each both other others same own just about after before between "
    "through during above below up down out off again further once because while until against "
    "one two however thus therefore e.g i.e etc"
)
STOPWORDS = frozenset(_STOPWORDS.split())
_AUXILIARIES = "is are was were can will may has have had must should could would might"
AUXILIARIES = frozenset(_AUXILIARIES.split())
# Words of the templates below: a disguise leaves them as they are.
_TEMPLATES = (
    "quote sentence mentions begins ends explain said say kind type number year work works role "
    "play happens speak text affect related thing many much use used question evidence answer"
)
TEMPLATE_WORDS = frozenset(_TEMPLATES.split())
NUMBER = re.compile(r"^\(?\d[\d.,:/]*%?\)?$")
YEAR = re.compile(r"^(1[5-9]|20)\d\d$")
EDGE = " .,;:!?()[]{}\"'“”‘’`*"


@dataclass(frozen=True)
class CreateQuestion:
    """A question about one sentence and the span of that sentence which answers it."""

    question: str
    answer: str


def clean(word: str) -> str:
    """Strip punctuation from both ends of a word."""
    return word.strip(EDGE)


def is_content(word: str) -> bool:
    """Say whether a word carries meaning of its own (neither stopword nor symbol)."""
    bare = clean(word)
    return len(bare) > 2 and bare.lower() not in STOPWORDS and bare[0].isalnum()


def is_askable(sentence: str) -> bool:
    """Say whether a sentence is prose long enough, and short enough, to ask about."""
    words = sentence.split()
    if not 6 <= len(words) <= 60 or len(sentence) > 420:
        return False
    plain = sum(1 for word in words if clean(word).isalpha())
    return plain >= 0.6 * len(words) and sum(map(is_content, words)) >= 4


def make_question(
    sentence: str,
    title: str,
    rng: random.Random,
    hardness: float = 1.0,
    common: frozenset[str] = frozenset(),
) -> CreateQuestion | None:
    """Make one question about `sentence`; None when no template fits.

    `hardness` (0 to 1) says how many of its words change; `common` holds the lower-case words that
    other sentences share, which would not tell this one from them.
    """
    words = sentence.split()
    spans = answer_spans(words, rng)
    if not spans:
        return None
    start, stop = spans[0]
    answer = " ".join(words[start:stop]).strip(EDGE)
    draw = rng.random()
    if draw < 0.45:
        question = clause_question(words, start, stop, rng, hardness)
    elif draw < 0.72:
        question = window_question(words, start, stop, rng, hardness, common)
    elif draw < 0.92:
        question = keyword_question(words, rng, common)
    else:
        question = quote_question(words, rng, common)
        answer = sentence if rng.random() < 0.3 else answer
    if rng.random() < 0.06 and len(title) < 60:
        question = question.rstrip("?.") + f" in {title}?"
    return CreateQuestion(question, answer) if answer else None


def answer_spans(words: list[str], rng: random.Random) -> list[tuple[int, int]]:
    """List spans that can answer a question: runs of one to five content words or numbers."""
    spans: list[tuple[int, int]] = []
    start = -1
    for i, word in enumerate([*words, "the"]):
        content = is_content(word) or bool(NUMBER.match(clean(word)))
        if content and start < 0:
            start = i
        breaks = start >= 0 and i > start and words[i - 1][-1] in ",;:)."
        if start >= 0 and (not content or breaks or i - start == 5):
            spans.append((start, i))
            start = i if content and i < len(words) else -1
    rng.shuffle(spans)
    # Numbers and names make the most natural questions: prefer them half of the time.
    if rng.random() < 0.5:
        spans.sort(key=lambda s: not any(clean(w)[:1].isdigit() for w in words[s[0] : s[1]]))
    return spans


def interrogative(words: list[str], rng: random.Random) -> str:
    """Choose the question word for an answer span."""
    first = clean(words[0])
    if YEAR.match(first):
        return rng.choice(["When", "In what year", "In which year"])
    if NUMBER.match(first):
        return rng.choice(["How many", "How much", "What number", "What"])
    if first[:1].isupper():
        return rng.choice(["Who", "What", "Which", "Where", "Who", "What"])
    if len(words) == 1:
        return rng.choice(["What", "What", "Which", "What kind of thing", "How"])
    tail = clean(words[-1]).lower()
    return rng.choice(["What", "What", f"Which {tail}", f"What {tail}", "What type", "Why", "How"])


def perturb(words: list[str], rng: random.Random, hardness: float) -> list[str]:
    """Drop, inflect and lower-case words, so that the match is by meaning-bearing words only."""
    keep_stop = rng.uniform(0.5, 1.0)
    keep_content = rng.uniform(1.0 - 0.3 * hardness, 1.0)
    result = []
    for word in words:
        bare = clean(word)
        content = is_content(word)
        if not bare or rng.random() > (keep_content if content else keep_stop):
            continue
        if content and rng.random() < 0.12 * hardness:
            bare = inflect(bare, rng)
        result.append(bare)
    return result


def inflect(word: str, rng: random.Random) -> str:
    """Change a word's ending or case."""
    if rng.random() < 0.3:
        return word.lower()
    for ending in ("ing", "ed", "es", "s", "ly"):
        if word.endswith(ending) and len(word) > len(ending) + 3:
            stem = word[: -len(ending)]
            return stem + rng.choice(["", "s", "ed", "ing", "e"])
    return word + rng.choice(["s", "ed", "ing", "s"])


def lower_first(words: list[str]) -> list[str]:
    """Lower-case the first word unless it looks like a name or an acronym."""
    if words and words[0][1:].islower() and words[0].lower() in STOPWORDS:
        return [words[0].lower(), *words[1:]]
    return words


def clause_question(
    words: list[str], start: int, stop: int, rng: random.Random, hardness: float
) -> str:
    """Turn a clause round its auxiliary verb: "What was X found in?"."""
    which = interrogative(words[start:stop], rng)
    places = [i for i, word in enumerate(words[:14]) if i > 0 and word.lower() in AUXILIARIES]
    limit = rng.randint(5, 14)
    if not places:
        verb = rng.choice(["does", "did", "do"])
        rest = perturb(lower_first(words[:start]), rng, hardness) + perturb(
            words[stop:], rng, hardness
        )
        return f"{which} {verb} {' '.join(rest[:limit])}?"
    place = min(places, key=lambda i: abs(i - start))
    subject, rest = words[:place], words[place + 1 :]
    if start < place:
        body = perturb(rest, rng, hardness)
    else:
        left = perturb(words[place + 1 : start], rng, hardness)
        right = perturb(words[stop:], rng, hardness)
        body = perturb(lower_first(subject)[-8:], rng, hardness) + left + right[: rng.randint(0, 6)]
    return f"{which} {words[place]} {' '.join(body[:limit])}?"


def window_question(
    words: list[str],
    start: int,
    stop: int,
    rng: random.Random,
    hardness: float,
    common: frozenset[str],
) -> str:
    """Ask for the span from the words on its two sides, in place or moved to the front."""
    left = perturb(lower_first(words)[max(0, start - rng.randint(2, 9)) : start], rng, hardness)
    right = perturb(words[stop : stop + rng.randint(2, 9)], rng, hardness)
    if len(left) + len(right) < 3:
        return keyword_question(words, rng, common)
    which = interrogative(words[start:stop], rng)
    draw = rng.random()
    if draw < 0.3:
        text = " ".join([*left, which.lower(), *right])
    elif draw < 0.7:
        text = " ".join([which, *right, *left])
    else:
        text = " ".join([which, *left, *right])
    return text[:1].upper() + text[1:] + "?"


KEYWORD_FORMS = (
    "What is said about {0} and {1}?",
    "What does it say about {0}, {1} and {2}?",
    "What is the {0} of {1}?",
    "How does {0} affect {1}?",
    "How is {0} related to {1}?",
    "Why is {0} used with {1}?",
    "How do I {0} {1}?",
    "How can I {0} the {1} {2}?",
    "How do you use {0} for {1}?",
    "What are the {0} {1} {2}?",
    "What happens to {0} when {1} {2}?",
    "Is there a {0} for {1}?",
    "Does {0} {1} {2}?",
    "Can {0} {1} the {2}?",
    "What is {0}?",
    "{0} {1} {2}?",
    "Why {0} {1}?",
    "What role does {0} play in {1} {2}?",
    "Which {0} were {1} with {2}?",
    "Who {0} the {1} and {2}?",
)


def telling_words(words: list[str], common: frozenset[str]) -> list[str]:
    """List the content words that tell a sentence from the others, or all where too few do."""
    content = [clean(word) for word in words if is_content(word)]
    telling = [word for word in content if word.lower() not in common]
    return telling if len(telling) > 1 else content


def keyword_question(words: list[str], rng: random.Random, common: frozenset[str]) -> str:
    """Ask about a few content words of the sentence."""
    content = telling_words(words, common)
    form = rng.choice(KEYWORD_FORMS)
    count = 3 if "{2}" in form else 2 if "{1}" in form else 1
    if count == 1:
        content = sorted(content, key=len)[-3:]
    picked = rng.sample(content, min(count, len(content)))
    if rng.random() < 0.7:
        picked.sort(key=content.index)
    picked += [content[-1]] * (3 - len(picked))
    picked = [inflect(word, rng) if rng.random() < 0.12 else word for word in picked]
    return form.format(*picked)


def quote_question(words: list[str], rng: random.Random, common: frozenset[str]) -> str:
    """Ask for the sentence itself, by its beginning, its end or a word in it."""
    content = telling_words(words, common)
    length = rng.randint(2, 5)
    draw = rng.random()
    if draw < 0.3:
        return f"Quote the sentence that begins with {' '.join(words[:length])}"
    if draw < 0.5:
        return f"Quote the sentence that ends with {' '.join(words[-length:])}"
    one, two = rng.sample(content, 2) if len(content) > 1 else (content[0], content[0])
    return rng.choice(
        [
            f"Quote the sentence that mentions {one}.",
            f"Which sentence mentions {one} and {two}?",
            f"Where does the text speak of {one} {two}?",
        ]
    )


HEADING_FORMS = (
    "What is {0}?",
    "How do I use {0}?",
    "What does it say about {0}?",
    "Explain {0}.",
    "How does {0} work?",
    "What about {0}?",
)


def heading_question(heading: str, rng: random.Random) -> str:
    """Make a question from a heading; a heading that is a question is taken as it is."""
    bare = heading.strip("# ").strip()
    if bare.endswith("?"):
        return bare
    return rng.choice(HEADING_FORMS).format(bare)
