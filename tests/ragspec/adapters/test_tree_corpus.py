from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ragspec.adapters.host_text import HostOptions, HostText, host_drafter
from ragspec.adapters.sglang import PAD, TreeCorpus
from ragspec.errors import InputError
from ragspec.retrievers import CorpusIndex
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import ancestors
from tests.support.vllm_driver import LIMIT, VOCAB, requests

NODES, TAIL = 12, 18


def corpus(options: HostOptions | None = None, chains: bool = False) -> TreeCorpus:
    return TreeCorpus(
        options or HostOptions(), nodes=NODES, vocab_size=VOCAB, limit=LIMIT, chains=chains
    )


def tree_of(tokens: np.ndarray, mask: np.ndarray) -> tuple[list[int], list[int]]:
    """Return tokens and parents of a row, as SGLang reads them: the latest node above is it."""
    parents = []
    for node in range(1, NODES):
        above = [other for other in range(node) if mask[node, other]]
        parents.append(max(above))
    return tokens[1:].tolist(), parents


def rows(result: tuple[np.ndarray, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    tokens, masks = result
    assert tokens.dtype == masks.dtype == np.int64
    yield from zip(tokens.reshape(-1, NODES), masks.reshape(-1, NODES, NODES), strict=True)


def test_whole_trees_and_their_masks_are_returned() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3, 9, 9, 1, 2, 3]
    expected = HostText(host_drafter(HostOptions()), text, VOCAB).draft(NODES - 1, LIMIT - 13)
    count = len(expected)
    assert len(set(expected.parents.tolist())) < count, "expected a tree with branches"
    ((tokens, mask),) = rows(corpus().batch_get(["a"], [text], [len(text)]))
    assert tokens[0] == 3
    assert tokens[1 : count + 1].tolist() == expected.tokens.tolist()
    assert (mask[1 : count + 1, 1 : count + 1] == ancestors(expected.parents)).all()
    assert (mask[:, 0] == 1).all() and (np.diag(mask) == 1).all()
    read, parents = tree_of(tokens, mask)
    assert parents[:count] == [parent + 1 for parent in expected.parents.tolist()]
    assert read[count:] == [PAD] * (NODES - 1 - count)
    assert parents[count:] == [0] * (NODES - 1 - count)
    assert mask[count + 1 :].sum() == 2 * (NODES - 1 - count)


def test_a_text_without_a_draft_is_a_root_and_pads() -> None:
    ((tokens, mask),) = rows(corpus().batch_get(["a"], [[5, 6]], [2]))
    assert tokens.tolist() == [6] + [PAD] * (NODES - 1)
    assert mask.sum() == 2 * NODES - 1


def decode(instance: TreeCorpus, count: int, seed: int = 0, retract: float = 0.0) -> list[int]:
    """Decode texts as SGLang's worker asks for trees, and return how many steps each took."""
    request, rng = requests(count), np.random.default_rng(seed)
    steps = [0] * count
    while live := [i for i in range(count) if not request[i].finished]:
        rng.shuffle(live)
        live = live[:4]
        whole = {i: [*request[i].prompt, *request[i].text[: request[i].done]] for i in live}
        # Under overlap the request itself does not know its newest tokens yet.
        behind = {i: int(rng.integers(0, min(request[i].done, 4) + 1)) for i in live}
        record = {f"r{i}": whole[i][: len(whole[i]) - behind[i]] for i in live}
        instance.lend({name: partial(list, text) for name, text in record.items()})
        result = instance.batch_get(
            [f"r{i}" for i in live], [whole[i][-TAIL:] for i in live], [len(whole[i]) for i in live]
        )
        for i, (tokens, mask) in zip(live, rows(result), strict=True):
            read, parents = tree_of(tokens, mask)
            tree = DraftTree.build(read, [parent - 1 for parent in parents], "host")
            request[i].draft, at = [], -1
            for token in request[i].text[request[i].done :]:
                below = np.flatnonzero((tree.parents == at) & (tree.tokens == token))
                if not len(below):
                    break
                at = int(below[0])
                request[i].draft.append(token)
            request[i].step()
            steps[i] += 1
        if rng.random() < retract:
            instance.erase_match_state([f"r{live[0]}"])
    return steps


def test_drafts_do_not_depend_on_other_requests_or_their_order() -> None:
    together, alone = decode(corpus(), 6), decode(corpus(), 6, seed=3)
    assert together == alone
    assert sum(together) < 6 * 80 / 2


def test_requests_that_were_forgotten_are_read_again_as_a_whole() -> None:
    assert sum(decode(corpus(), 6, retract=0.3)) < 6 * 80 / 2


def test_a_request_id_with_another_text_is_read_again_and_reset_forgets_all() -> None:
    instance = corpus()
    instance.batch_get(["a"], [[1, 2, 3, 1, 2]], [5])
    ((tokens, _),) = rows(instance.batch_get(["a"], [[7, 8, 9, 7, 8, 9, 7]], [7]))
    assert tokens[:3].tolist() == [7, 8, 9]
    instance.reset()
    assert not instance._texts


def test_requests_share_no_drafts() -> None:
    instance, secret = corpus(), list(range(50, 70))
    instance.batch_get(["a"], [secret], [20])
    instance.batch_put([secret])
    instance.synchronize()
    ((tokens, _),) = rows(instance.batch_get(["b"], [secret[:6]], [6]))
    assert not set(tokens[1:].tolist()) & set(secret)


def test_external_corpora_are_refused_with_a_remedy() -> None:
    instance = corpus()
    assert instance.remaining_token_budget == 0 and not instance.list_external_corpora()
    with pytest.raises(InputError, match=r"ragspec store build.*register"):
        instance.load_external_corpus_named("books", [[1, 2]])


def test_a_store_is_drafted_from(tmp_path: Path) -> None:
    text = list(range(100, 140))
    CorpusIndex.build([text], VOCAB, tmp_path / "store").close()
    instance = corpus(HostOptions.read({"store": str(tmp_path / "store")}))
    ((tokens, _),) = rows(instance.batch_get(["a"], [text[:6]], [6]))
    assert tokens[1:].tolist() == text[6 : 6 + NODES - 1]
