"""Forwards on ONNX Runtime give the texts of the model's own modules, or the modules run."""

import copy
import importlib.util
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models import onnx_session
from ragspec.models.block_linear import BlockLinear
from ragspec.models.quantized import quantized
from ragspec.models.resolve import STARTER
from ragspec.needs import LAST
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget, read_states, score_tokens
from ragspec.verification.onnx import form
from ragspec.verification.onnx import target as module
from ragspec.verification.onnx.form import hindrance
from ragspec.verification.onnx.target import OnnxTarget
from ragspec.verification.open import open_target
from ragspec.verification.probe import probe
from tests.support import tiny
from tests.support.noisy import NoisyTrees

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
NEW = 40
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 12}
BOUNDS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied, one key head, biases": (
        "llama",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen 2": ("qwen2", {}),
    "qwen 3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {}),
    "phi 3": ("phi3", {"sliding_window": 24}),
    "granite": ("granite", GRANITE),
    "gemma 2": ("gemma2", GEMMA | BOUNDS),
    "gemma 3": ("gemma3_text", GEMMA | {"num_hidden_layers": 6}),
}
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, top_p=0.9, seed=3),
    Sampling(temperature=1.0, repetition_penalty=1.3, seed=4),
]


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(module, "FOLD_FROM", 1)


def llama_3() -> Any:
    """Return a model whose rotary table is scaled by parts."""
    model = tiny.model("llama", mlp_bias=True)
    config = copy.deepcopy(model.config)
    config.rope_parameters = LLAMA_3
    scaled = type(model)(config).eval()
    scaled.load_state_dict(model.state_dict())
    return scaled


@pytest.fixture(params=[*MODELS, "llama 3"], ids=lambda name: name.replace(" ", "-"))
def model(request: pytest.FixtureRequest) -> Any:
    if request.param == "llama 3":
        return llama_3()
    family, settings = MODELS[request.param]
    return tiny.model(family, **settings)


def write(engine: Engine, prompts: Any, sampling: Sampling | None = None) -> Any:
    return engine.generate(prompts, sampling, max_new_tokens=NEW, ignore_eos=True)


def through_modules(model: Any) -> Engine:
    """Return an engine without drafts whose forwards run in torch."""
    return Engine(open_target(model, runtime="torch"), None, None)


def test_texts_equal_those_of_the_modules_with_and_without_drafts(model: Any) -> None:
    target = open_target(model)
    assert target.runtime == "onnx" and probe(target).mode == "tree"
    own = through_modules(model)
    prompt = tiny.prompt(30)
    for sampling in SAMPLINGS:
        expected = write(own, prompt, sampling)
        assert expected.report.runtime == "torch"
        drafters = None, NoisyTrees({tuple(prompt): expected.tokens})
        for engine in (Engine(target, None, each, budget=8) for each in drafters):
            result = write(engine, prompt, sampling)
            assert result.tokens == expected.tokens and result.report.runtime == "onnx"
            assert result.report.accepted > NEW / 4 or engine.drafter is None


def test_batched_texts_and_cached_prefixes_give_the_texts_of_each_alone(model: Any) -> None:
    own = through_modules(model)
    beginning = tiny.prompt(300)
    prompts = [[*beginning, *tiny.prompt(9 + n, seed=n + 1)] for n in range(4)]
    expected = [write(own, prompt).tokens for prompt in prompts]
    engine = Engine(model, None, "context", budget=6)
    assert [each.tokens for each in write(engine, prompts)] == expected
    for prompt, tokens in zip(reversed(prompts), reversed(expected), strict=True):
        result = write(engine, prompt)  # some of its slots lie in buffers of others
        assert result.tokens == tokens and result.report.cached_tokens >= 300


def test_hidden_states_and_scores_are_those_of_the_modules(model: Any) -> None:
    target, own = open_target(model), CausalTarget(model)
    text = tiny.prompt(50)
    ((_, ours),), ((_, theirs),) = (read_states(each, [text]) for each in (target, own))
    torch.testing.assert_close(ours.of((LAST,)), theirs.of((LAST,)), atol=1e-3, rtol=1e-3)
    scored, expected = ([s.logprob for s in score_tokens(t, text, 0)] for t in (target, own))
    assert scored[1:] == pytest.approx(expected[1:], abs=1e-3)


@pytest.mark.parametrize("positions", [16, 21, 22, 30, 31])  # a table ends at any slot
def test_positions_past_a_table_are_right(monkeypatch: pytest.MonkeyPatch, positions: int) -> None:
    monkeypatch.setattr(module, "POSITIONS", positions)
    model, prompt = llama_3(), tiny.prompt(20)
    expected = write(through_modules(model), prompt).tokens
    for drafter in (None, "recycling"):
        engine = Engine(open_target(model, runtime="onnx"), None, drafter)
        assert write(engine, prompt).tokens == expected


def test_changed_weights_and_hooks_run_through_the_modules() -> None:
    model, prompt = copy.deepcopy(tiny.model()), tiny.prompt()
    engine = Engine(model, None, None)
    before = write(engine, prompt)
    hook = model.model.norm.register_forward_hook(lambda _m, _i, out: -out)
    assert write(engine, prompt).tokens != before.tokens
    hook.remove()
    model(torch.tensor([prompt]), output_hidden_states=True)  # transformers leaves idle hooks
    for each in (engine, Engine(model, None, None)):
        assert write(each, prompt).report.runtime == before.report.runtime == "onnx"
    stored, down = small(model), model.model.layers[0].mlp.down_proj.weight.data
    codes = stored.model.layers[0].mlp.down_proj.codes.data
    cases = (model, model.model.norm.weight, -3.0), (model, down, -3.0), (stored, codes, 3)
    for each, weight, factor in cases:
        engine = Engine(each, None, None)
        before = write(engine, prompt)
        with torch.no_grad():
            weight.mul_(factor)
        after = write(engine, prompt)
        assert after.report.runtime == "torch" and after.tokens != before.tokens
        assert after.tokens == write(through_modules(copy.deepcopy(each)), prompt).tokens


def test_host_code_of_a_step_has_one_thread_and_models_have_all() -> None:
    counts, others = list[int](), list[int]()

    def process(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts.append(torch.get_num_threads())
        thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return scores

    def observe(*_: object) -> None:
        modules.append(torch.get_num_threads())

    modules = list[int]()
    model = copy.deepcopy(tiny.model())
    torch.set_num_threads(2)
    try:
        target = open_target(model)
        assert isinstance(target, OnnxTarget)
        engine, prompt = Engine(target, None, None), tiny.prompt()
        engine.generate([prompt, prompt[3:]], max_new_tokens=4, logits_processor=[process])
        assert set(counts) == {1} and set(others) == {2} and torch.get_num_threads() == 2
        together = target._together  # opened in a step
        assert together is not None
        assert together.session.inner.get_session_options().intra_op_num_threads == 2
        model.model.norm.register_forward_hook(observe)
        engine.generate(prompt, max_new_tokens=4)
        assert set(modules) == {2}
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("gpt2", {}, "no graph is known for GPT2LMHeadModel"),
        ("gemma2", {"use_bidirectional_attention": True}, "attend to later ones"),
        ("llama", {"dtype": torch.bfloat16}, "not all in float32"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("qwen3", {"head_dim": 24}, "its heads or their rotated parts are 24 wide"),
        ("phi3", {"partial_rotary_factor": 0.5}, "are 8 wide, no multiple of 16"),
    ],
)
def test_models_without_a_graph_say_why(family: str, settings: dict[str, Any], reason: str) -> None:
    model = tiny.model(family, **settings)
    target = open_target(model)
    assert target.runtime == "torch" and reason in target.detour
    with pytest.raises(UnsupportedModelError, match=reason):
        open_target(model, runtime="onnx")


def test_reasons_against_onnx_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny.model())
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert "its model.layers.1.mlp was changed" in hindrance(CausalTarget(model))
    hook.remove()
    assert hindrance(CausalTarget(model)) == ""
    monkeypatch.setattr(form, "LEAST_WEIGHTS", 1 << 20)
    assert "fewer than" in open_target(model).detour
    real = importlib.util.find_spec
    monkeypatch.setattr(onnx_session, "find_spec", lambda n: None if n == "onnx" else real(n))
    assert "onnx is not installed (pip install 'ragspec[onnx]')" in open_target(model).detour
    with pytest.raises(InputError, match="got runtime='gpu'"):
        open_target(model, runtime="gpu")
    with pytest.raises(UnsupportedModelError, match="fixed shape"):
        open_target(model, "eager", runtime="onnx")


def small(model: Any) -> Any:
    """Return a model with quantized weights."""
    return quantized(copy.deepcopy(model))


def test_forwards_whose_bits_depend_on_width_are_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    run = module.GraphRunner.run

    def other(self: Any, rows: Any, views: Any, *rest: Any) -> list[torch.Tensor]:
        factor = 1 + 1e-6 * (views[0].positions.shape[1] > 200)
        return [each * factor for each in run(self, rows, views, *rest)]

    for runs, rounding in ((run, False), (other, True)):
        monkeypatch.setattr(module.GraphRunner, "run", runs)
        engine = Engine(open_target(small(tiny.model("llama"))), None, "recycling")
        assert ("rounding" in write(engine, tiny.prompt(30)).label) == rounding


def test_quantized_positions_have_equal_bits_in_every_forward(model: Any) -> None:
    """In forwards of 1 to 40 tokens, beside other texts, after a cached beginning or a long one."""
    target, generator = open_target(small(model)), torch.Generator().manual_seed(1)
    text = [*tiny.prompt(260), *tiny.prompt(60, seed=2)]
    with target.open(2, 8) as session, torch.no_grad():

        def read(widths: list[int], row: int) -> torch.Tensor:
            session.select_rows([row])
            logits, start = [], 0
            for width in widths:
                if start >= len(text):
                    break
                first, *chain = text[start : start + width]
                logits += session.verify([[first]], [DraftTree.chain(chain, "test")])
                session.commit([range(len(chain))])
                start += width
            return torch.cat(logits)

        whole = read([len(text)], 0)
        widths = torch.randint(1, 41, (len(text),), generator=generator).tolist()
        assert torch.equal(read(widths, 1), whole)
    scored = [s.logprob for s in score_tokens(target, text, 0)]
    expected = whole.double().log_softmax(-1)[range(len(text) - 1), text[1:]]
    assert scored[1:] == expected.tolist()
    engine = Engine(target, None, None)
    alone = [write(engine, text[:n]).tokens for n in (100, 270, 300)]
    together = write(engine, [text[:n] for n in (300, 100, 270)])
    assert [each.tokens for each in together] == [alone[n] for n in (2, 0, 1)]


def test_batched_sequences_have_the_bits_of_each_alone(model: Any) -> None:
    """Eleven, in two groups; some end, widths differ, and hidden states come with the logits."""
    target, text = open_target(small(model)), tiny.prompt(90)
    rows, generator = 11, torch.Generator().manual_seed(2)
    taps = LAST, 0
    with target.open(1 + rows, 8) as session, torch.no_grad():
        session.keep_hidden(taps)
        session.select_rows([0])
        (whole,) = session.verify([[text[0]]], [DraftTree.chain(text[1:], "test")])
        (states,) = session.hidden
        places = [0] * rows
        while alive := [row for row in range(rows) if places[row] < len(text) - row]:
            session.select_rows([1 + row for row in alive])
            widths = torch.randint(1, 9, (len(alive),), generator=generator).tolist()
            pieces = [text[places[row] :][:n] for row, n in zip(alive, widths, strict=True)]
            chains = [DraftTree.chain(piece[1:], "test") for piece in pieces]
            logits = session.verify([piece[:1] for piece in pieces], chains)
            for row, piece, got, hidden in zip(alive, pieces, logits, session.hidden, strict=True):
                part = slice(places[row], places[row] + len(piece))
                assert torch.equal(got, whole[part])
                assert torch.equal(hidden.of(taps), states.of(taps)[:, part])
                places[row] += len(piece)
            session.commit([range(len(piece) - 1) for piece in pieces])


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_changes_nothing(default: torch.dtype) -> None:
    engine = Engine(open_target(tiny.model("llama"), runtime="onnx"))
    expected = engine.generate(tiny.prompt(), max_new_tokens=NEW)
    engine.prefix_cache.clear()
    torch.set_default_dtype(default)
    try:
        result = engine.generate(tiny.prompt(), max_new_tokens=NEW)
    finally:
        torch.set_default_dtype(torch.float32)
    assert result.tokens == expected.tokens


@pytest.mark.parametrize("stored", [copy.deepcopy, small], ids=["float32", "int8"])
def test_copies_open_separate_sessions(stored: Callable[[Any], Any]) -> None:
    engine, prompt = Engine(stored(tiny.model("qwen2", seed=5)), None, "lookup"), tiny.prompt()
    expected = write(engine, prompt)
    for other in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        result = write(other, prompt)
        assert result.tokens == expected.tokens and other.model is not engine.model
        assert (result.report.runtime, result.label) == ("onnx", expected.label)


def test_quantized_states_are_those_of_the_modules(model: Any) -> None:
    model, text = copy.deepcopy(model), tiny.prompt(50)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "layernorm" in name:  # inputs of several sizes
            weight.data = 3.0 ** torch.rand(weight.shape, generator=generator) - 1.0
    model = small(model)
    targets = (open_target(model, runtime=name) for name in ("onnx", "torch"))
    ours, theirs = (next(read_states(each, [text]))[1].of((LAST,)) for each in targets)
    assert float((ours - theirs).abs().mean()) < 0.01 * float(theirs.std())


def test_projections_in_other_blocks_or_of_another_layer_stay_apart() -> None:
    models = [copy.deepcopy(tiny.model()) for _ in range(2)]
    key = models[0].model.layers[0].self_attn.k_proj
    key.weight.data = BlockLinear.of(key).weight.detach()  # as Q8_0 has it
    first, second, *_ = models[1].model.layers
    second.self_attn.q_proj = first.self_attn.q_proj
    for model in models:
        target = open_target(small(model))
        assert target.runtime == "onnx", target.detour


def test_quantized_labels_and_changes() -> None:
    model = small(tiny.model())
    target, text = open_target(model), tiny.prompt(50)
    own = open_target(model, runtime="torch")
    assert probe(target).mode == "tree" and not target.rounds and own.rounds
    hook = model.model.norm.register_forward_hook(lambda *_: None)
    result = write(Engine(target, None, "lookup", budget=4), text)
    assert result.report.runtime == "torch" and result.label == "exact up to rounding"
    hook.remove()
    assert write(Engine(target, None, "lookup", budget=4), text).label == "exact"
    linear = type(model.lm_head)
    turned = {"forward": lambda m, x: -linear.forward(m, x)}
    model.lm_head.__class__ = type("Turned", (linear,), turned)
    other = write(Engine(target, None, None), text)
    assert other.report.runtime == "torch" and other.tokens != result.tokens
    assert not target.packs, "the probe after a change lets several sequences share a forward"


SILENT = """
import os
from ragspec.engine.engine import Engine
engine = Engine.from_pretrained("starter", runtime="onnx")
engine.generate("A draft", max_new_tokens=4)
assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"
links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n.isdecimal()
         and os.path.islink(f"/proc/self/fd/{n}")]
print([link for link in links if link.startswith("socket")])
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="lists open files by /proc")
def test_no_socket_is_opened_and_nothing_is_written_at_home(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": ""}
    environment["PYTHONPATH"] = str(STARTER.parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", SILENT],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stdout.strip() == "[]"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if "ragspec" not in str(path.relative_to(tmp_path))]


def test_the_starter_runs_on_it_by_default() -> None:
    assert isinstance(Engine.from_pretrained("starter").target, OnnxTarget)
