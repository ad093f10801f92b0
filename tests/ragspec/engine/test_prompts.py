"""Prompts and predictions in every accepted form; others are errors that say what is expected."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from ragspec import Engine, Sampling
from ragspec.drafters.build import with_prediction
from ragspec.drafters.fuse import Fuse, within
from ragspec.engine.prompts import ANCHOR, check_length, encode_prompts, read_prediction
from ragspec.errors import InputError, PromptTooLongError
from ragspec.retrievers import ContextDrafter, HierarchyDrafter, NeighbourDrafter
from ragspec.rules.rejection import ChainRejection
from ragspec.rules.walk import Walk
from ragspec.trees.draft_tree import PREDICTION, DraftKind
from tests.support import tiny
from tests.support.fixed import FixedDrafter

TEXT = "ab cd"
IDS = [65, 66, 0, 67, 68]
CHAT = [{"role": "user", "content": "hi"}]


def encoded(prompts: Any, mask: Any = None, *, chat: bool = False) -> tuple[list[list[int]], bool]:
    result = encode_prompts(prompts, tiny.tokenizer(chat=chat), tiny.VOCAB, mask)
    assert all(type(token) is int for ids in result[0] for token in ids)
    return result


TOKENIZER = tiny.tokenizer()
ONE: list[Any] = [TEXT, IDS, tuple(IDS), torch.tensor(IDS), list(np.array(IDS)), {"input_ids": IDS}]
ONE += [torch.tensor([IDS], dtype=torch.int32), np.array(IDS), np.array([IDS], dtype=np.uint8)]
ONE += [TOKENIZER(TEXT), TOKENIZER(TEXT, return_tensors="pt")]


BATCH: list[Any] = [[TEXT, "xy"], (TEXT, "xy"), [IDS, [88, 89]], [TEXT, [88, 89]]]
BATCH += [[np.array(IDS), torch.tensor([88, 89])], [torch.tensor([IDS]), "xy"]]
BATCH += [TOKENIZER([TEXT, "xy"]), TOKENIZER([TEXT, "xy"], padding=True)]
BATCH += [TOKENIZER([TEXT, "xy"], padding=True, return_tensors="pt")]
BATCH += [[TOKENIZER(TEXT), TOKENIZER("xy")]]


FORMS = [
    *((form, [IDS], True) for form in ONE),
    *((each, [IDS], False) for each in ([TEXT], [IDS])),
]
FORMS += [*((form, [IDS, [88, 89]], False) for form in BATCH), ([[5]], [[5]], False)]


@pytest.mark.parametrize(("form", "ids", "single"), FORMS)
def test_forms_of_one_prompt_and_of_a_batch(form: Any, ids: list[list[int]], single: bool) -> None:
    assert encoded(form) == (ids, single)


def test_chat_messages_and_batches_of_them() -> None:
    expected = tiny.tokenizer()("<user> hi\n<assistant> ")["input_ids"]
    assert encoded(CHAT, chat=True) == ([expected], True)
    assert encoded([CHAT, CHAT], chat=True) == ([expected, expected], False)
    assert encoded([CHAT, "xy"], chat=True) == ([expected, [88, 89]], False)


@pytest.mark.parametrize("text", ["The Rh", "The Rh ", " a\n", "", "\n "])
def test_a_chat_continues_the_last_turn_of_the_assistant(text: str) -> None:
    expected = tiny.tokenizer()(f"<user> hi\n<assistant> {text * bool(text.strip())}")["input_ids"]
    assert encoded([*CHAT, {"role": "assistant", "content": text}], chat=True)[0] == [expected]


def test_control_tokens_of_a_chat_come_from_the_template_alone() -> None:
    tokens = copy.deepcopy(tiny.tokenizer(chat=True))
    tokens.add_special_tokens({"bos_token": "<user>"})  # the template writes it, and a user does
    chat = [{"role": "user", "content": "a <user> b"}]
    (ids,), _ = encode_prompts(chat, tokens, len(tokens))
    assert ids.count(tokens.bos_token_id) == 1 and len(ids) > 20


def test_a_text_that_begins_with_the_first_token_has_it_once() -> None:
    tokens = copy.deepcopy(tiny.bpe_tokenizer())
    begin = tokens.bos_token = tokens.eos_token
    pair = (begin, tokens.eos_token_id)
    tokens.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A", None, [pair])
    expected = tokens("a draft")["input_ids"]
    for text in ("a draft", begin + "a draft"):
        assert encode_prompts(text, tokens, len(tokens)) == ([expected], True)


def test_a_mask_removes_padding_on_either_side() -> None:
    ids = torch.tensor([[96, 96, 5, 6], [7, 8, 96, 96]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]])
    assert encoded(ids, mask) == ([[5, 6], [7, 8]], False)
    assert encoded(ids, list(mask.numpy())) == ([[5, 6], [7, 8]], False)
    for one in (mask[0], (0, 0, 1, 1), [(0, 0, 1, 1)]):
        assert encoded(ids[0], one) == ([[5, 6]], True)
    rows = {"input_ids": [(96, 5), (7, 8)], "attention_mask": [(0, 1), (1, 1)]}
    assert encoded(rows) == ([[5], [7, 8]], False)
    assert encoded(ids.numpy(), mask.numpy()) == ([[5, 6], [7, 8]], False)


NO_PROMPT = [None, 5, 5.0, b"abc", {"a": 1}, {5, 6}, iter([5, 6]), object(), [], "", [[]], [None]]
MIXED = [["a", ""], ["a", 5], [5, "a"], [5, 6.5], [5, None], [5.0, 6.0], [True, False]]
MIXED += [[*CHAT, "b"], ["b", *CHAT], [[5, 6], 7], [5, [6, 7]], [["a", "b"]], [[[5, 6]]]]
SHAPES = [torch.zeros(shape, dtype=torch.int64) for shape in ((), 0, (0, 4), (2, 0), (1, 1, 1))]
ARRAYS = [np.array(["a", "b"]), np.array([1.5]), np.array([None]), torch.tensor([0.5])]
ARRAYS += [torch.tensor([True]), [torch.tensor(5)], [torch.tensor([[5, 6], [7, 8]])]]
RUBBISH = [*NO_PROMPT, *MIXED, *SHAPES, *ARRAYS, [97], [-1], [1 << 70]]


# Cases are named by type: the texts of some objects differ from process to process.
@pytest.mark.parametrize("rubbish", RUBBISH, ids=lambda each: type(each).__name__)
def test_invalid_prompts_are_refused(rubbish: Any) -> None:
    with pytest.raises(InputError, match=r"expected|give at least"):
        encoded(rubbish, chat=True)


@pytest.mark.parametrize(
    ("prompts", "mask", "message"),
    [
        (torch.tensor([[5, 6, 7]]), torch.ones(1, 2), "same shape"),
        (torch.tensor([[5, 6, 7]]), torch.zeros(1, 3), "empty"),
        ([[5, 6, 7]], torch.ones(1, 3), "attention_mask with a list"),
        *(({"input_ids": [5], "attention_mask": m}, None, "same shape") for m in ([1, 1], 1)),
        *(({"input_ids": [[5]], "attention_mask": m}, None, "same shape") for m in ([1], [[1, 1]])),
        ({"input_ids": torch.tensor([5]), "attention_mask": [[1], [1, 1]]}, None, "same shape"),
        ([[5], [97]], None, r"prompt 2 of 2 has the token id 97; expected 0 to 96"),
        (CHAT, None, "chat template"),
        (["a", "b", ""], None, "prompt 3 of 3 is empty"),
        (["a", "b", []], None, "prompt 3 of 3: got an empty list"),
        ("", None, "the prompt is empty"),
    ],
)
def test_errors_name_the_prompt_and_the_remedy(prompts: Any, mask: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        encoded(prompts, mask)
    with pytest.raises(InputError, match="pass Engine"):
        encode_prompts("text", None, 97)


def test_texts_that_outgrow_the_context() -> None:
    check_length(10, 6, 16)
    check_length(10, 6, None)
    with pytest.raises(PromptTooLongError, match="by 1 token, or set max_new_tokens to 6 or less"):
        check_length(10, 7, 16)
    with pytest.raises(PromptTooLongError, match=r"by 1 token\."):
        check_length(16, 1, 16)
    for prompt, new in ((10, 999), (16, 999), (16, 16)):  # more than the prompt has
        with pytest.raises(PromptTooLongError) as error:
            check_length(prompt, new, 16)
        assert "shorten the prompt by" not in str(error.value)


def test_the_tokenizer_does_not_warn_of_long_texts() -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer(chat=True))  # other tests share it
    tokenizer.model_max_length, tokenizer.deprecation_warnings = 2, {}
    for prompt in ("long", [{"role": "user", "content": "long"}]):
        encode_prompts(prompt, tokenizer, 97)
    assert not tokenizer.deprecation_warnings  # where transformers notes that it has warned


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: [{"type": "text", "text": text}]])
def test_lone_surrogates_in_prompts_and_predictions_are_replaced(wrap: Any) -> None:
    assert encoded("a\ud83db") == encoded("a\ufffdb")
    broken, whole = ([{"role": "user", "content": wrap(t)}] for t in ("a\ud83d", "a\ufffd"))
    assert encoded(broken, chat=True) == encoded(whole, chat=True)
    tokenizer = tiny.bpe_tokenizer()
    expected = read("a\ufffdb", tokenizer=tokenizer)
    assert read("a\ud83db", tokenizer=tokenizer) == expected
    assert read({"type": "content", "content": wrap("a\ud83db")}, tokenizer=tokenizer) == expected


def test_a_content_may_come_in_text_parts() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    whole = encoded(CHAT, chat=True)
    assert encoded([{"role": "user", "content": parts}], chat=True) == whole
    picture = [{"type": "text", "text": "h"}, {"type": "image", "url": "x"}]
    with pytest.raises(InputError, match=r"message 1 has parts of the types \['text', 'image'\]"):
        encoded([{"role": "user", "content": picture}], chat=True)


def test_messages_that_the_template_refuses_are_named() -> None:
    for wrong in ({"content": "hi"}, {"role": 3, "content": "hi"}):
        with pytest.raises(InputError, match="message 2 has no role"):
            encoded([*CHAT, wrong], chat=True)
    strict = copy.deepcopy(tiny.tokenizer(chat=True))  # it is cached
    strict.chat_template = "{{ raise_exception('turns must alternate') }}"
    with pytest.raises(InputError, match=r"turns must alternate.* got the roles user"):
        encode_prompts(CHAT, strict, tiny.VOCAB)


PROMPT = tiny.prompt(12)
NEW = 30


def read(prediction: Any, prompts: int = 1, tokenizer: Any = TOKENIZER) -> list[Any]:
    inputs = [[*PROMPT, number] for number in range(prompts)]
    result = read_prediction(prediction, inputs, tokenizer, tiny.VOCAB)
    return [None if text is None else list(text.tokens[ANCHOR:]) for text in result]


@pytest.mark.parametrize(
    "form",
    [
        "abc",
        [65, 66, 67],
        {"type": "content", "content": "abc"},
        {"type": "content", "content": [{"type": "text", "text": "ab"}, {"text": "c"}]},
    ],
)
def test_every_form_of_a_prediction_is_read(form: Any) -> None:
    assert read(form) == [[65, 66, 67]]
    assert read(form, 2) == [[65, 66, 67]] * 2
    assert read([form, None], 2) == [[65, 66, 67], None]


def test_no_prediction_is_no_text() -> None:
    assert read(None) == read("") == read([]) == [None]


def test_a_prediction_begins_with_the_end_of_the_prompt() -> None:
    (text,) = read_prediction([7], [PROMPT], None, tiny.VOCAB)
    assert text is not None
    assert text.tokens == (*PROMPT[-ANCHOR:], 7)
    assert (text.document, text.offset) == (PREDICTION, -ANCHOR)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (3.5, "float as a prediction; expected a text"),
        (b"abc", "bytes as a prediction; expected a text"),
        ([1, "x"], "token id 'x'"),
        ({"content": None}, "without text"),
        ([[tiny.VOCAB]], "token id 97; expected 0 to 96"),
        (["a", "b"], "2 predictions for 1 prompt;"),
    ],
)
def test_other_forms_of_a_prediction_are_refused(form: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(form)
    with pytest.raises(InputError, match="no tokenizer"):
        read("abc", tokenizer=None)


def generate(prediction: Any, sampling: Sampling, drafter: str | None = "context") -> Any:
    engine = Engine(tiny.model("llama", dtype=torch.float64), TOKENIZER, drafter=drafter, budget=8)
    options: Any = {"max_new_tokens": NEW, "ignore_eos": True, "prediction": prediction}
    return engine.generate(PROMPT, sampling, **options)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=4)])
def test_right_predictions_save_forwards_and_wrong_ones_change_nothing(sampling: Sampling) -> None:
    plain = generate(None, sampling, drafter=None)
    right = generate(plain.tokens, sampling)
    assert right.tokens == plain.tokens
    assert right.report.forwards <= 6
    assert right.report.accepted_prediction_tokens >= NEW - 8
    half = [(t + 1) % tiny.VOCAB if i % 5 == 4 else t for i, t in enumerate(plain.tokens)]
    wrong = generate(half, sampling)
    assert wrong.tokens == plain.tokens
    assert wrong.report.rejected_prediction_tokens > 0
    assert right.report.forwards < wrong.report.forwards < plain.report.forwards
    assert generate("nothing of the kind", sampling).tokens == plain.tokens
    assert generate(half, sampling, drafter=None).tokens == plain.tokens


def test_predictions_are_drafted_from_beside_drafters_that_read_no_texts() -> None:
    plain = generate(None, Sampling(), drafter=None)
    for drafter in ("recycling", "rasd", "hierarchy"):
        right = generate(plain.tokens, Sampling(), drafter=drafter)
        assert right.tokens == plain.tokens
        assert right.report.accepted_prediction_tokens >= NEW - 8
        assert right.report.accepted_by_source["prediction"] >= NEW - 8


def test_the_drafter_of_predictions_is_added_only_if_needed_and_judged_by_the_rule() -> None:
    walk, chain = Walk(), ChainRejection()
    context, recycling = ContextDrafter(), NeighbourDrafter()
    joined = with_prediction(Fuse([recycling]), walk)
    assert [each.name for each in within(joined)] == ["fuse", "context", "recycling"]
    for reads in (Fuse([context]), Fuse([recycling, Fuse([context])]), HierarchyDrafter()):
        assert with_prediction(reads, walk) is reads
    sample = Fuse([FixedDrafter([1], kind=DraftKind.SAMPLED)])
    assert with_prediction(sample, chain) is sample


def test_each_prompt_of_a_batch_has_its_prediction() -> None:
    model = tiny.model("llama", dtype=torch.float64)
    prompts = [tiny.prompt(9, seed=seed) for seed in range(3)]
    plain = Engine(model, drafter=None).generate(prompts, max_new_tokens=NEW, ignore_eos=True)
    engine = Engine(model, drafter="context", budget=8, max_batch_size=2)
    options: Any = {"max_new_tokens": NEW, "ignore_eos": True}
    result = engine.generate(prompts, prediction=[g.tokens for g in plain], **options)
    assert [g.tokens for g in result] == [g.tokens for g in plain]
    assert all(g.report.accepted_prediction_tokens > NEW / 2 for g in result)


def test_predicted_tokens_are_not_cited() -> None:
    steps = generate(generate(None, Sampling()).tokens, Sampling()).steps
    documents = {int(step.tree.origin[node][0]) for step in steps for node in step.path}
    assert documents <= {-1, PREDICTION}
    assert PREDICTION in documents
