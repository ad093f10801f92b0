"""A stand-in for vLLM's model runner: rows that move, share prompts, stop and come back.

It passes what vLLM 0.32 passes, verifies greedily against texts that are fixed beforehand, and
holds the proposer to the contract: a list for each row, no longer than asked for, of plain ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCAB = 200
LIMIT = 512

RUNNER = """
class GPUModelRunner:
    def propose_draft_token_ids(self, sampled_token_ids, slot_mappings):
        spec_config = self.speculative_config
        if spec_config.method == "ngram":
            drafts = self.drafter.propose(spec_config.k, sampled_token_ids)
        elif spec_config.method == "custom_class":
            drafts = self.drafter.propose(
                sampled_token_ids,
                self.input_batch.num_tokens_no_spec,
                self.input_batch.token_ids_cpu,
                slot_mappings=slot_mappings,
            )
        return drafts
"""


def config(longest: int = 8, rows: int = 8, **options: Any) -> SimpleNamespace:
    """Return what a proposer reads of vLLM's config; options: ours."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=longest),
        model_config=SimpleNamespace(
            get_vocab_size=lambda: VOCAB, max_model_len=LIMIT, tokenizer="none"
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        additional_config={"ragspec": options},
    )


@dataclass
class Request:
    """One text: its prompt, all that it will say, and what was said so far."""

    prompt: list[int]
    text: list[int]
    done: int = 0
    draft: list[int] = field(default_factory=list)
    steps: int = 0

    @property
    def finished(self) -> bool:
        return self.done >= len(self.text)

    def step(self) -> list[int]:
        """Take what holds of the draft and one token more."""
        left = self.text[self.done :]
        held = 0
        while held < min(len(self.draft), len(left) - 1) and self.draft[held] == left[held]:
            held += 1
        self.done += held + 1
        self.steps += 1
        self.draft = []
        return left[: held + 1]


def requests(count: int) -> list[Request]:
    """Return texts that quote their prompts; two of them at a time have one prompt."""
    results = []
    for number in range(count):
        rng = np.random.default_rng([0, number // 2])
        document = rng.integers(0, VOCAB, 60).tolist()
        rng = np.random.default_rng([0, number, 1])
        text: list[int] = []
        while len(text) < 80:
            start = int(rng.integers(0, 50))
            text += rng.integers(0, VOCAB, 2).tolist()
            text += document[start : start + int(rng.integers(4, 12))]
        results.append(Request([*document, 7], text[:80]))
    return results


def drive(proposer: Any, request: Sequence[Request], rows: int = 4, preempt: float = 0.0) -> None:
    """Decode all texts, at most `rows` at a time, in rows that change at every step.

    preempt: the chance that a text is left out of a step; what it had drafted is lost then.
    """
    rng = np.random.default_rng(0)
    # Rows are reused: what stood in them before stays behind the new text.
    table = np.zeros((rows, LIMIT), dtype=np.int32)
    while any(not each.finished for each in request):
        open_ones = [each for each in request if not each.finished]
        rng.shuffle(open_ones)
        lengths = np.zeros(rows, dtype=np.int32)
        sampled: list[list[int]] = []
        live = open_ones[:rows]
        for row, each in enumerate(live):
            if rng.random() < preempt:  # its prompt is being read again
                each.draft = []
                sampled.append([])
            else:
                sampled.append(each.step())
            whole = [*each.prompt, *each.text[: each.done]]
            table[row, : len(whole)] = whole
            lengths[row] = len(whole)
        drafts = proposer.propose(sampled, lengths, table, slot_mappings=None)
        assert len(drafts) == len(live)
        for each, new, draft in zip(live, sampled, drafts, strict=True):
            assert all(type(token) is int for token in draft)
            assert new or not draft
            each.draft = draft
