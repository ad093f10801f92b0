"""The scripts that made the starter text models: data, mix, fast kernels, training, gate."""

import gzip
import importlib
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

module = importlib.import_module
pytestmark = pytest.mark.usefixtures("training_path")
ROOT = Path(__file__).resolve().parents[2]
SENTENCES = (
    "The harbour of Almen was built by Dutch engineers in 1704 after the great flood.",
    "Merchants from the northern valleys brought copper kettles to its autumn market.",
    "A narrow canal joins the harbour to the granary behind the old customs house.",
    "In winter the keepers burn peat because coal is too heavy for the small barges.",
    "Three stone bridges cross the canal, and the middle bridge carries a wooden clock.",
    "Visitors can climb the lighthouse when the wind is below thirty kilometres an hour.",
)


def document(title: str, kind: str = "docs") -> Any:
    rng = random.Random(title)
    lines = [" ".join(rng.sample(SENTENCES, 3)) for _ in range(8)]
    return module("text_data").Document(title, kind, "\n\n".join(lines))


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "training"))
        return module("text_tokenizer").train_tokenizer([" ".join(SENTENCES)] * 3, size=400)


def mix_of(tokenizer: Any, seed: int = 3) -> Any:
    data = module("text_data")
    gold = data.GoldQuestion("Almen", SENTENCES[0], "Who built it?", SENTENCES[0], "Dutch")
    return module("text_mix").Mix([document("Almen"), document("Orte")], [gold], tokenizer, seed)


@cache
def starter_tokenizer() -> Any:
    auto = importlib.import_module("transformers").AutoTokenizer
    return auto.from_pretrained(ROOT / "ragspec/starter/target")


@given(st.text())
def test_the_starter_tokenizer_is_lossless(text: str) -> None:
    tokenizer = starter_tokenizer()
    text = text.encode("utf-8", "ignore").decode()  # lone surrogates have no UTF-8 form
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tokenizer_ends_with_token_zero(tokenizer: Any) -> None:
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.encode("a b") == tokenizer.encode("a b", add_special_tokens=False)


def test_sentences_keep_their_closing_marks() -> None:
    text = 'It ran (see Fig. 3) on. “He did.” Then (it went.) "No!" she said.\nNext line\n\nend'
    spans = module("text_data").sentence_spans(text)
    assert [text[a:b] for a, b in spans] == [
        "It ran (see Fig. 3) on.",
        "“He did.”",
        "Then (it went.)",
        '"No!" she said.',
        "Next line",
        "end",
    ]


def test_share_alike_text_is_left_out(tmp_path: Path) -> None:
    data = module("text_data")
    folder = tmp_path / "data" / "lm"
    folder.mkdir(parents=True)
    qa = "Context:\n[1] a\nforeign text\n\n[2] b\nown text here.\n\nQuestion: q?\nEvidence: [2] own"
    records = [
        {"kind": "docs", "doc": "a", "license": "CC-BY-SA-4.0", "text": "no"},
        {"kind": "docs", "doc": "b", "license": "MIT", "text": "# Title\n\nyes"},
        {"kind": "qa", "doc": "covid/1", "license": "CC-BY", "text": qa + " text\nAnswer: own\n"},
    ]
    with gzip.open(folder / "train.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, records)))
    assert [d.title for d in data.read_documents(tmp_path)] == ["Title"]
    questions = data.read_questions(tmp_path)
    # The other passages of a question may be share-alike: only the gold one is kept.
    assert [(q.title, q.passage, q.answer) for q in questions] == [("b", "own text here.", "own")]


def test_created_questions_use_words_of_their_sentence() -> None:
    questions = module("text_questions")
    rng = random.Random(0)
    for sentence in SENTENCES * 20:
        assert questions.is_askable(sentence)
        instance = questions.make_question(sentence, "Almen", rng)
        assert instance is not None and instance.answer in sentence
        stems = {word[:4].lower() for word in re.findall(r"\w+", sentence)}
        assert any(word[:4].lower() in stems for word in re.findall(r"\w{4,}", instance.question))


@pytest.mark.parametrize("hardness", [0.0, 1.0])
def test_every_evidence_line_quotes_the_passage_it_names(tokenizer: Any, hardness: float) -> None:
    answering = mix_of(tokenizer).answering
    rng = random.Random(1)
    for _ in range(40):
        sample = answering.sample(1400, hardness, rng)
        assert sample is not None and len(sample.tokens) == len(sample.weights) <= 1400
        assert len(sample.hints) == len(sample.tokens)
        assert sample.tokens[-1] == 0 and sample.weights[-1] > 0
        text = tokenizer.decode(sample.tokens)
        context = text.partition("\n\nQuestion:")[0].removeprefix("Context:\n")
        passages = re.split(r"\n\n(?=\[\d\] )", context)
        result = re.findall(r"\nEvidence: \[(\d)\] ([^\n]*)\nAnswer: [^\n]*<\|endoftext\|>", text)
        assert result
        for number, quote in result:
            assert quote in passages[int(number) - 1]


def test_hints_report_the_sentence_and_the_passage_of_every_token(tokenizer: Any) -> None:
    answering = mix_of(tokenizer).answering
    sample = None
    rng = random.Random(4)
    while sample is None or "[2]" not in tokenizer.decode(sample.tokens):
        sample = answering.sample(1400, 1.0, rng)
    tokens, hints = sample.tokens, sample.hints
    for hop, start, number in hints:
        assert hop in (0, 1, 2) and (start > 0) == (number > 0) == (hop > 0)
    numbers = [number for hop, _, number in hints if hop == 1]
    assert numbers == sorted(numbers) and max(numbers) > 1
    places = [i for i, hint in enumerate(hints) if hint[0] == 2]
    assert places
    _, start, number = hints[places[-1]]
    line = tokenizer.decode(tokens[places[-1] :]).partition("Evidence:")[2]
    assert line.startswith(f" [{number}]")
    assert line.partition("]")[2].startswith(tokenizer.decode([start]))


def test_a_brief_sample_never_teaches_to_stop_short(tokenizer: Any) -> None:
    sample = mix_of(tokenizer).answering.sample(600, 0.0, random.Random(3), brief=True)
    newline = tokenizer.encode("\n")[0]
    for token, weight in zip(sample.tokens, sample.weights, strict=True):
        assert weight == 0.0 or token not in (0, newline)


def test_disguise_is_one_map_of_words() -> None:
    disguise = module("text_sample").Disguise(["zebra", "yacht", "xylem"], 5, 1.0)
    words = re.findall(r"\w+", disguise("The harbour, the Harbour and 1704 of 1704"))
    assert words[1] == words[3].lower() and words[1] in ("zebra", "yacht", "xylem")
    assert words[0] == "The" and words[5] == words[7] != "1704" and len(words[5]) == 4


def test_batches_depend_on_seed_and_step_alone(tokenizer: Any) -> None:
    shares = module("text_mix").Shares()
    first = mix_of(tokenizer).batch(4, 2, 300, shares)
    again = mix_of(tokenizer)
    again.batch(1, 1, 200, shares)
    assert again.batch(4, 2, 300, shares) == first
    assert again.batch(5, 2, 300, shares) != first
    for row in first:
        assert len(row.tokens) == len(row.weights) == len(row.hints) == 301


def test_copying_rewards_repeats_only(tokenizer: Any) -> None:
    mix = mix_of(tokenizer)
    rng = random.Random(2)
    for _ in range(50):
        sample = mix.copying(200, rng)
        assert len(sample.tokens) == len(sample.weights) <= 200
        for i, weight in enumerate(sample.weights):
            if weight == 1.0:
                pair = sample.tokens[i - 1 : i + 1]
                earlier = zip(sample.tokens, sample.tokens[1:], strict=False)
                assert pair in [list(two) for two in list(earlier)[: i - 1]]


def tiny(name: str = "draft", layers: int = 2) -> Any:
    torch.manual_seed(0)
    return module("text_model").build_model(
        name, 400, hidden_size=128, num_hidden_layers=layers, intermediate_size=96
    )


@pytest.mark.parametrize("length", [1, 100, 128, 300])
def test_fast_kernels_give_the_loss_and_gradients_of_the_plain_ones(length: int) -> None:
    text_model = module("text_model")
    plain, fast = tiny(), tiny()
    text_model.use_block_attention(fast)
    tokens = torch.randint(0, 400, (2, length + 1), generator=torch.Generator().manual_seed(1))
    weights = (tokens % 3).float()
    weights[0, 1] = 2.0
    logits = plain(input_ids=tokens[:, :-1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    expected = (losses * weights[:, 1:].flatten()).sum()
    got, extra = text_model.weighted_loss(fast, tokens, weights)
    assert float(extra) == 0.0
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    expected.backward()  # type: ignore[no-untyped-call]
    got.backward()
    for one, two in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-3, atol=2e-4)


def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    text_train = module("text_train")
    monkeypatch.setattr(text_train, "build_model", tiny)
    return text_train.Trainer("draft", 1, 5e-3, 3e-3)


def test_resumed_runs_equal_unbroken_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, 400, (4, 65), generator=torch.Generator().manual_seed(1))
    weights = torch.ones(4, 65)
    one = trainer(monkeypatch)
    one.update(tokens, weights, 1.0)
    one.save(tmp_path / "last.pt")
    two = trainer(monkeypatch)
    two.load(tmp_path / "last.pt")
    assert (two.step, two.tokens) == (1, 256)
    assert one.update(tokens, weights, 0.5) == two.update(tokens, weights, 0.5)
    for key, master in one.masters.items():
        assert torch.equal(master, two.masters[key])


def test_training_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(monkeypatch)
    tokens = torch.randint(0, 400, (4, 65), generator=torch.Generator().manual_seed(1))
    hints = torch.zeros(4, 65, 3, dtype=torch.long)
    losses = [run.update(tokens, torch.ones(4, 65), 1.0, hints) for _ in range(25)]
    assert losses[-1][0] < losses[0][0] - 1.0
    # The draft's head learns the token before from the first layer.
    assert losses[-1][1] < losses[0][1] - 0.5


def test_hints_train_the_layers_they_name() -> None:
    text_model = module("text_model")
    torch.manual_seed(0)
    model = tiny("target", layers=6)
    heads = text_model.Hints(128)
    torch.nn.init.normal_(heads.starts[0].weight)
    hints = torch.zeros(2, 33, 3, dtype=torch.long)
    hints[:, :20] = torch.tensor([1, 7, 2])
    tokens = torch.randint(0, 400, (2, 33))
    _, extra = text_model.weighted_loss(model, tokens, torch.ones(2, 33), hints, heads)
    extra.backward()
    layers = [layer.mlp.down_proj.weight.grad for layer in model.model.layers]
    assert all(grad is not None and bool(grad.any()) for grad in layers[:3])
    assert not any(grad is not None and bool(grad.any()) for grad in layers[3:])


def test_the_rate_warms_up_stays_and_falls() -> None:
    factor = module("text_train").rate_factor
    assert factor(0, 1e6, 600) == 0.01
    assert factor(500, 1e6, 600) == 1.0
    assert factor(500, 300, 600) == 0.5
    assert factor(500, 0, 600) == 0.0


@pytest.mark.parametrize(
    "script",
    [f"text_{part}" for part in ("tokenizer", "train", "export", "gate")]
    + [f"image_{part}" for part in ("tokenizer", "train", "export", "sheet", "card")],
)
def test_scripts_explain_themselves(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit) as stopped:
        module(script).main()
    assert stopped.value.code == 0 and "usage" in capsys.readouterr().out


def test_export_keeps_the_weights(tmp_path: Path, tokenizer: Any, monkeypatch: Any) -> None:
    export = module("text_export")
    monkeypatch.setattr(export, "build_model", tiny)
    run = trainer(monkeypatch)
    run.save(tmp_path / "last.pt")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    export.export("draft", tmp_path / "last.pt", tmp_path / "tokenizer", tmp_path / "out")
    transformers = importlib.import_module("transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, run.masters[key].to(torch.bfloat16))


LINES = [SENTENCES[number] for number in (0, 1, 3)]


def item(evidence: str) -> Any:
    gate = module("text_gate")
    passages = [" ".join(LINES[:2]), " ".join(LINES[2:])]
    text = "\n\n".join(passages)
    return gate.Item("x", "", passages, text, evidence, ["Dutch engineers"], "Who built it?")


def test_the_gate_judges_quotes() -> None:
    judge = module("text_gate").judge
    good = judge(item(LINES[0]), f" [1] {LINES[0]}\nAnswer: Dutch engineers", True)
    assert all(good[key] for key in ("verbatim", "overlap", "ended", "answer", "label"))
    wrong = judge(item(LINES[0]), f" [1] {LINES[2]}\nAnswer: peat", False)
    assert wrong["verbatim"]
    assert not any(wrong[key] for key in ("overlap", "ended", "answer", "label"))
    built_up = judge(item(LINES[0]), " [1] The harbour of Almen was built by French hands", True)
    assert not built_up["verbatim"] and not built_up["overlap"]
    assert not judge(item(LINES[0]), " [1] The harbour of Almen\nAnswer: it", True)["verbatim"]


def test_the_gate_takes_the_shared_records_of_valid_documents(tmp_path: Path) -> None:
    context = "Context:\n[1] Almen\nIt is a harbour.\n\n[2] Peat\nPeat burns well."
    text = f"{context}\n\nQuestion: What burns?\nEvidence: [2] Peat burns well.\nAnswer: Peat"
    records = [
        {"id": "r1", "kind": "qa", "text": text},
        {"id": "r2", "kind": "qa", "text": text.replace("[2] Peat\n", "[2] Other\n")},
        {"id": "r3", "kind": "docs", "text": text},
    ]
    titles = [{"title": "Peat", "split": "valid"}, {"title": "Other", "split": "train"}]
    for name, lines in (("docqa/documents", titles), ("lm/valid", records)):
        path = tmp_path / "data" / f"{name}.jsonl.gz"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    (result,) = module("text_gate").read_records(tmp_path, "valid")
    assert result.name == "r1" and result.evidence == "Peat burns well."
    assert result.prompt == context + "\n\nQuestion: What burns?\nEvidence:"
    assert result.passages == ["It is a harbour.", "Peat burns well."]
    assert result.answers == ["Peat"]
