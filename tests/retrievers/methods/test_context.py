import gzip
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import DraftContext, DraftRequest, DraftSession, SourceText
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.prompt_lookup import LookupDrafter
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import PREDICTION, ROOT
from ragspec.trees.operations import follow, paths
from tests.support.spelling import check_draft, spelled

VOCAB = 5
tokens = st.integers(0, VOCAB - 1)
STOP = 90
NO_STARTS: frozenset[int] = frozenset()


def context(prompt: Sequence[int], output: Sequence[int] = (), remaining: int = 50) -> DraftContext:
    return DraftContext([*prompt, *output], len(prompt), remaining)


def steps(session: DraftSession, prompt: Sequence[int], truth: Sequence[int], budget: int) -> int:
    """Return the number of steps in which the drafter's trees cover `truth`."""
    place = context(prompt)
    done = count = 0
    while done < len(truth):
        place.remaining = len(truth) - done
        tree = session.propose(place, budget)
        path = follow(tree, truth[done : len(truth) - 1])
        emitted = truth[done : done + len(path) + 1]
        session.observe(Step(tree, path, tuple(emitted)))
        place.tokens.extend(emitted)
        done += len(emitted)
        count += 1
    return count


@st.composite
def requests(draw: st.DrawFn) -> DraftRequest:
    """Draw a request with documents as further texts and in the prompt."""
    texts = draw(st.lists(st.lists(tokens, min_size=1, max_size=10), max_size=2))
    prompt: list[int] = draw(st.lists(tokens, min_size=1, max_size=6))
    spans = []
    for number in range(draw(st.integers(0, 2))):
        copied = draw(st.lists(tokens, min_size=1, max_size=8))
        spans.append((len(prompt), len(prompt) + len(copied), 10 + number, 3))
        prompt += copied + draw(st.lists(tokens, max_size=4))
    sources = tuple(SourceText(tuple(text), i, 7 * i) for i, text in enumerate(texts))
    return DraftRequest(tuple(prompt), VOCAB, tuple(spans), sources)


@given(requests(), st.lists(tokens, max_size=10), st.integers(0, 12), st.integers(1, 6))
def test_proposals_occur_in_the_text_and_name_their_origin(
    request: DraftRequest, output: list[int], budget: int, remaining: int
) -> None:
    session = ContextDrafter(NO_STARTS).open(request)
    tree = session.propose(context(request.prompt, output, remaining), budget)
    check_draft(tree, VOCAB, budget, remaining)
    assert (np.diff(tree.accept_prob) <= 0).all()
    written = [*request.prompt, *output]
    chunks = [list(text.tokens) for text in request.texts] + [written]
    pairs = {pair for piece in chunks for pair in pairwise(piece)}
    for path in paths(tree.parents):
        assert set(pairwise([written[-1], *tree.tokens[list(path)].tolist()])) <= pairs
    documents = {text.document: (text.offset, text.tokens) for text in request.texts}
    for start, end, document, offset in request.spans:
        documents[document] = (offset, request.prompt[start:end])
    for token, (document, place) in zip(tree.tokens, tree.origin.tolist(), strict=True):
        if document >= 0:
            offset, text = documents[document]
            assert 0 <= place - offset < len(text)
            assert text[place - offset] == token


@given(requests(), st.lists(tokens, max_size=10))
def test_the_first_node_continues_the_longest_match(
    request: DraftRequest, output: list[int]
) -> None:
    written = [*request.prompt, *output]
    chunks = [list(text.tokens) for text in request.texts] + [written]
    following: set[int] = set()
    for n in range(len(written), 0, -1):
        places = ((piece, i) for piece in chunks for i in range(len(piece) - n))
        following = {text[i + n] for text, i in places if text[i : i + n] == written[-n:]}
        if following:
            break
    tree = ContextDrafter(NO_STARTS).open(request).propose(context(request.prompt, output), 1)
    assert set(tree.tokens.tolist()) <= following
    assert len(tree) == bool(following)


def test_copying_a_document_takes_one_step_per_budget() -> None:
    document = list(range(10, 50))
    prompt = [1, *document, 2, 10]
    request = DraftRequest(tuple(prompt), 100, spans=((1, 41, 0, 0),))
    assert steps(ContextDrafter().open(request), prompt, document[1:], budget=12) == 3


def test_two_continuations_become_two_branches() -> None:
    prompt = (1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3)
    tree = ContextDrafter().open(DraftRequest(prompt, 100)).propose(context(prompt), 4)
    assert sorted(tree.tokens[tree.parents == ROOT].tolist()[:2]) == [4, 5]


def test_a_longer_match_has_more_accept_prob() -> None:
    prompt = (1, 2, 3, 4, 5, 6, 7)
    short, long = (
        ContextDrafter().open(DraftRequest(prompt, 100)).propose(context(prompt, output), 1)
        for output in ((50, 3), (1, 2, 3))
    )
    assert long.accept_prob[0] > short.accept_prob[0] > 0


def test_rejections_lower_accept_prob() -> None:
    prompt = (1, 2, 3, 4)
    session = ContextDrafter().open(DraftRequest(prompt, 100))
    place = context(prompt)
    known = []
    for turn in range(8):
        place.tokens += [2, 60 + turn, 2]
        tree = session.propose(place, 1)
        known.append(float(tree.accept_prob[0]))
        session.observe(Step(tree, (), (80 + turn,)))
        place.tokens.append(80 + turn)
    assert known[-1] < 0.5 * known[0]


def test_the_sentence_nearest_the_question_is_drafted_after_a_label() -> None:
    first = [10, 11, 12, STOP, 20, 21, 22, STOP, 30, 31, 32, STOP]
    prompt = [70, 71, *first, 70, 72, 40, 41, STOP, 31, 32, 80]
    request = DraftRequest(tuple(prompt), 100, spans=((2, 14, 0, 0), (16, 19, 1, 0)))
    place = context(prompt, [70, 71])
    tree = ContextDrafter().open(request).propose(place, 10)
    origin = dict(zip(tree.tokens.tolist(), tree.origin.tolist(), strict=True))
    assert (origin[30], origin[31]) == ([0, 8], [0, 9])
    without = ContextDrafter(NO_STARTS).open(request).propose(place, 10)
    assert without.tokens[without.parents == ROOT].tolist() == [10]


def test_a_label_copied_from_a_further_text_continues_into_its_document() -> None:
    first, second = [10, 11, 12, STOP, 20, 21, 22, STOP], [40, 41, STOP, 50, 51, STOP]
    prompt = [60, 71, 72, *first, 60, 73, 72, *second, 20, 21, 80]
    spans = ((3, 11, 0, 0), (14, 20, 1, 0))
    layout = SourceText((21, 80, 70, 71, 72), PREDICTION, -2)
    request = DraftRequest(tuple(prompt), 100, spans=spans, texts=(layout,))
    tree = ContextDrafter().open(request).propose(context(prompt), 12)
    assert (70, 71, 72, 20) in spelled(tree)
    origin = dict(zip(tree.tokens.tolist(), tree.origin.tolist(), strict=True))
    assert origin[70][0] == PREDICTION
    assert origin[20] == [0, 4]


def test_fewer_steps_than_prompt_lookup_on_quoted_evidence(shared: Path) -> None:
    with gzip.open(shared / "docqa" / "documents.jsonl.gz", "rt", encoding="utf-8") as lines:
        documents = {record["doc_id"]: record for record in map(json.loads, lines)}
    ids: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        return [
            ids.setdefault(part, len(ids)) for part in re.findall(r"\s?\w+|\s?[^\w\s]|\s", text)
        ]

    lookup = LookupDrafter(longest=3, shortest=2, tokens=10)
    ours = theirs = 0
    with open(shared / "docqa" / "items.jsonl", encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines]
    for item in [item for item in items if item["tier"] == "wiki"][:8]:
        head, document = encode("Context:\n[1] title\n"), encode(documents[item["doc_id"]]["text"])
        prompt = head + document + encode(f"\n\nQuestion: {item['question']}\nEvidence:")
        truth = encode(f" [1] {item['evidence']}\nAnswer: {item['answers'][0]}\n")
        spans = ((len(head), len(head) + len(document), 0, 0),)
        request = DraftRequest(tuple(prompt), 1 << 20, spans)
        ours += steps(ContextDrafter().open(request), prompt, truth, 10)
        theirs += steps(lookup.open(request), prompt, truth, 10)
    assert ours <= 0.9 * theirs


@given(st.lists(tokens, min_size=1, max_size=40), st.lists(tokens, max_size=10))
def test_expected_acceptance_equals_accept_prob_of_the_best_node(
    prompt: list[int], output: list[int]
) -> None:
    session = ContextDrafter(NO_STARTS).open(DraftRequest(tuple(prompt), VOCAB))
    place = context(prompt, output)
    expected_acceptance = session.expected_acceptance(place)
    tree = session.propose(place, 1)
    assert expected_acceptance == (np.float32(tree.accept_prob[0]) if len(tree) else 0.0)
