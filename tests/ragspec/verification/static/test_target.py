"""Buffers and steps between sessions: moved weights, memory errors and failed steps."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.errors import ModelError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.model_cache import StepLayer, step_cache
from ragspec.verification.open import open_static
from ragspec.verification.static.buffers import Arena, compact
from ragspec.verification.static.layout import MOST_QUERIES
from ragspec.verification.static.runner import StepRunner
from ragspec.verification.static.step import StaticStep, StepShape
from ragspec.verification.tree_attention import lease
from tests.support import tiny
from tests.support.calls import failing, noted
from tests.support.model_state import state_of
from tests.support.sessions import EMPTY, follow, prefill, static_session

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
NEW = 12
TURNS = Sampling(  # writes these three tokens by turns, if all are counted
    frequency_penalty=30.0, logit_bias=dict.fromkeys((10, 11, 12), 99.0)
)


def local_model() -> Any:
    return copy.deepcopy(tiny.model("llama", dtype=torch.float64))


def opened(model: Any, mode: str = "eager") -> CausalTarget:
    target = open_static(CausalTarget(model), mode, backend="eager")
    assert target.runner is not None, target.static
    return target


def runner(target: CausalTarget) -> StepRunner:
    assert target.runner is not None
    return target.runner


def drafting(target: Any) -> Engine:
    return Engine(target, tiny.tokenizer(), drafter="context", budget=3)


def write(engine: Engine, sampling: Sampling | None = None) -> Any:
    return engine.generate(PROMPT, sampling, max_new_tokens=NEW, ignore_eos=True)


def written(model: Any, sampling: Sampling | None = None) -> list[int]:
    return list(write(drafting(model), sampling).tokens)


def take_a_step(target: CausalTarget) -> Any:
    """Take a step in a session that ends, and return the arena that it was taken in."""
    with static_session(target, 1, 40) as session:
        prefill(session, PROMPT)
        session.verify([[1]], [DraftTree.chain([2, 3], "test")])
        return session._arena


def replace_a_weight(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight = torch.nn.Parameter(attention.q_proj.weight.detach().flip(0))


def change_a_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-2.0)


@pytest.mark.parametrize(
    ("change", "selected"), [(replace_a_weight, False), (change_a_weight, True)]
)
def test_steps_are_created_again_after_weights_move(change: Any, selected: bool) -> None:
    """A captured step reads fixed addresses, so it misses weights that have moved."""
    model = local_model()
    target = opened(model)
    arena = take_a_step(target)
    steps = list(arena.steps.values())
    change(model)
    again = runner(target).lend_arena(set(), 1, 40)
    assert again is arena and steps
    assert list(again.steps.values()) == (steps if selected else [])


def test_texts_that_join_a_session_use_the_current_weights() -> None:
    """A pool keeps one session for all its texts."""
    model = local_model()
    with static_session(opened(model), most=2) as session:
        session.select_rows([session.join(prompt)[0] for prompt in ([1, 2], [3, 4])])
        prefill(session, [1, 2], [3, 4])
        prefill(session, [5], [6])
        session.leave(1)
        session.join([7, 8])
        steps = session._arena.steps
        assert steps, "the weights are where they were"
        session.leave(1)
        replace_a_weight(model)
        session.join([7, 8])
        assert not steps


def test_a_repeated_step_counts_new_tokens_once() -> None:
    """A capture runs it several times, and so does a retry after a memory error."""
    model = local_model()
    distribution = TokenDistribution(Sampling(frequency_penalty=0.5), NoiseStream(0), 2)
    with static_session(opened(model), 1, 40) as session:
        prefill(session, [1, 2])
        for text in ([1, 2, 5], [1, 2, 5, 6], [1, 2, 5, 6, 6]):
            follow(session, [text[-1:]], [EMPTY], [distribution], [text])
            session.commit([()])
        keys: list[Any] = list(session._arena.steps)
        (key,) = (key for key in keys if key[0][0].distribution is not None)
        penalties = session._arena.distributions[1]._penalties
        assert penalties is not None
        held = penalties._held[1, 0, 0, :10].clone()
        assert held.tolist() == [0, 0, 0, 0, 0, 1, 2, 0, 0, 0]
        with lease(model, session._configs):
            session._arena.steps[key]()
        assert torch.equal(penalties._held[1, 0, 0, :10], held)


def test_the_steps_of_the_trial_are_not_those_of_texts() -> None:
    """The trial runs eager steps in every mode."""
    with static_session(opened(local_model(), "compile"), 2, 40) as session:
        prefill(session, PROMPT, PROMPT)
        session.verify([[1], [2]], [EMPTY] * 2)
        steps = session._arena.steps
    shape = StepShape(rows=2, queries=1, slots=128)
    keys: list[Any] = list(steps)
    assert sorted(mode for (current, _), mode in keys if current == shape) == ["compile", "eager"]


def test_buffers_that_are_too_small_are_not_lent() -> None:
    target = opened(local_model())
    arena, steps = take_a_step(target), runner(target)
    assert steps.lend_arena(set(), 1, arena.slots - MOST_QUERIES) is arena
    assert steps.lend_arena(set(), 1, arena.slots) is not arena
    assert steps.lend_arena(set(), arena.rows + 1, 40) is not arena


def test_small_buffers_of_several_texts_are_lent_again_and_large_ones_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = runner(opened(local_model()))

    def lend() -> set[int]:
        texts: list[set[int]] = [set() for _ in range(3)]
        return {id(steps.lend_arena(text, 1, 40)) for text in texts}

    first = lend()
    assert len(first) == 3 and lend() == first
    monkeypatch.setattr("ragspec.verification.static.runner.FIRST_BYTES", 1)
    assert lend() and len(steps._free) == 1


@pytest.mark.parametrize("when", ["create", "taken", "ran"])
def test_a_text_survives_running_out_of_memory(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = local_model()
    target = opened(model, "compile")
    where: Any = runner(target) if when == "create" else StaticStep
    name = "_create" if when == "create" else "__call__"
    current, calls = getattr(where, name), 0

    def short_of_memory(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if target.static != "eager" and (when == "create" or calls > 1):
            if when == "ran":  # its new tokens are counted already
                current(*args, **options)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return current(*args, **options)

    monkeypatch.setattr(where, name, short_of_memory)
    with pytest.warns(RuntimeWarning, match="memory ended while a step was capt") as warned:
        text = write(drafting(target), TURNS)
    assert len(warned) == 1
    assert text.tokens == written(model, TURNS)
    assert text.report.static == target.static == "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert written(target, TURNS) == text.tokens


def test_a_step_that_cannot_be_compiled_is_reported_and_the_text_goes_on() -> None:
    model = local_model()
    current = model.model.layers[0].forward

    def asks(*args: Any, **options: Any) -> Any:
        states = current(*args, **options)
        return states if float(states.sum()) != 0.123 else states * 2  # graphs cannot branch so

    model.model.layers[0].forward = asks
    engine = drafting(opened(model, "compile"))
    with pytest.warns(RuntimeWarning, match=r"a step could not be captured \(\w+: ") as warned:
        text = write(engine)
    assert len(warned) == 1
    assert text.report.static == "eager"
    assert text.tokens == written(local_model())


def test_errors_of_the_model_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is unchanged, and the next text is correct."""
    model = local_model()
    before = state_of(model)
    target = opened(model)
    expected = written(model)
    engine = drafting(target)
    layer = model.model.layers[1]
    breaks = failing(ZeroDivisionError("of the model"), range(4, 99), layer.forward)
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", breaks)
        with pytest.raises(ZeroDivisionError, match="of the model"):
            write(engine)
    vars(layer).pop("forward", None)  # the patch leaves the bound method behind
    assert state_of(model) == before
    assert write(engine).tokens == expected
    assert state_of(model) == before


def test_tokens_before_a_failed_step_are_penalised_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = local_model(), list[int]()
    # After the step that fails each row is tried alone.
    fails = failing(RuntimeError("an accident"), (4,), StepRunner.take)

    def texts(target: Any) -> list[list[int]]:
        engine = Engine(target, drafter=None)
        results = engine.generate([PROMPT, [4, 1]], TURNS, max_new_tokens=NEW, ignore_eos=True)
        return [result.tokens for result in results]

    expected = texts(CausalTarget(model))
    target = opened(model)
    monkeypatch.setattr(StepRunner, "take", noted(fails, calls, lambda *inputs: len(inputs)))
    assert texts(target) == expected and len(calls) > 4


@pytest.mark.parametrize("running", [1, 3])
def test_steps_of_others_leave_a_prompt_that_is_read_in_chunks_alone(running: int) -> None:
    model, prompt = local_model(), tiny.prompt(200, seed=9)
    expected = Engine(CausalTarget(model), drafter=None).generate(prompt, max_new_tokens=NEW)
    with Engine(opened(model), drafter=None).with_limits(8, chunk=16) as engine:
        endless: dict[str, Any] = {"max_new_tokens": 300, "ignore_eos": True}
        others = [engine.submit(PROMPT[i:], None, **endless) for i in range(running)]
        for each in others:
            next(each)
        handle = engine.submit(prompt, max_new_tokens=NEW)
        assert handle.result().tokens == expected.tokens
        assert not any(each.done for each in others)
        for each in others:
            each.cancel()


def test_a_model_in_training_is_refused() -> None:
    model = local_model()
    with opened(model).open(1, 40) as session, torch.no_grad():
        prefill(session, PROMPT)
        model.train()
        with pytest.raises(ModelError, match=r"put into training mode .* Call model\.eval\(\)"):
            session.verify([[1]], [EMPTY])


@pytest.mark.parametrize("modes", [("eager", "eager"), ("eager", "off")])
def test_two_engines_over_one_model_write_at_once(modes: tuple[str, str]) -> None:
    model = local_model()
    before = state_of(model)
    expected = written(model)
    targets = [opened(model, m) if m != "off" else CausalTarget(model) for m in modes]
    engines = [drafting(target) for target in targets]
    streams = [engine.stream(PROMPT, max_new_tokens=NEW, ignore_eos=True) for engine in engines]
    for _ in range(NEW):  # in turns, forward by forward
        for stream in streams:
            next(stream, None)
    assert [stream.result.tokens for stream in streams] == [expected] * 2

    def texts(engine: Engine) -> list[list[int]]:
        return [write(engine).tokens for _ in range(3)]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(texts, engines, timeout=60)) == [[expected] * 3] * 2
    assert state_of(model) == before


WIDE = torch.empty(1, 2, 1, 8, dtype=torch.float64)
NARROW = torch.empty(1, 1, 1, 4)
LAYERS = [(WIDE, WIDE), (NARROW, WIDE), (WIDE, NARROW)]
ROWS, SLOTS = 4, 10


def filled() -> Arena:
    stacks = Arena(LAYERS, ROWS, SLOTS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for buffer in stacks.buffers:
            buffer.normal_()
    return stacks


def addresses(stacks: Arena) -> list[int]:
    return [buffer.data_ptr() for buffer in stacks.buffers]


def test_buffers_move_only_to_grow_and_keep_their_contents() -> None:
    stacks = filled()
    row = stacks.caches[1]
    before, held = addresses(stacks), [buffer.clone() for buffer in stacks.buffers]
    stacks.reserve(SLOTS)
    assert addresses(stacks) == before
    stacks.reserve(SLOTS + 1)
    assert stacks.slots == row.buffers.capacity == 2 * SLOTS
    for buffer, old in zip(stacks.buffers, held, strict=True):
        assert torch.equal(buffer[:, :, :, :SLOTS], old)
        assert not buffer[:, :, :, SLOTS:].any()
    keys, _ = row.buffers.slots(0, 0, 1)
    assert keys.data_ptr() == stacks.pairs()[0][0][1].data_ptr()
    stacks.reserve(100)
    assert stacks.slots == 100


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_writes_its_slots_in_place_and_sees_all(rows: int) -> None:
    stacks = filled()
    held = [buffer.clone() for buffer in stacks.buffers]
    columns = torch.tensor([[2, 3], [0, 1], [6, 7]])[:rows]
    layer = step_cache(stacks, rows, 8, columns).layers[0]
    assert isinstance(layer, StepLayer)
    keys, values = torch.ones(rows, 2, 2, 8).double(), 2 * torch.ones(rows, 2, 2, 8).double()
    known_keys, known_values = layer.update(keys, values)
    assert known_keys.shape == known_values.shape == (rows, 2, 8, 8)
    assert layer.get_mask_sizes(2) == (8, 0) and layer.get_max_length() == 8
    assert layer.get_seq_length() == 0
    for row in range(rows):
        assert bool((known_keys[row, :, columns[row]] == 1).all())
        assert bool((known_values[row, :, columns[row]] == 2).all())
    changed = [int((now != old).sum()) for now, old in zip(stacks.buffers, held, strict=True)]
    assert changed == [rows * 2 * 2 * 8 * 2, 0], "nothing else is written"
    assert known_keys.data_ptr() == stacks.pairs()[0][0].data_ptr()


def test_slots_move_in_all_layers_of_the_first_rows() -> None:
    stacks = filled()
    held = [buffer.clone() for buffer in stacks.buffers]
    source = torch.tensor([[3, 5, 7], [2, 2, 4]])
    target = torch.tensor([[3, 4, 5], [1, 2, 3]])
    compact(stacks.buffers, source, target)
    for now, old in zip(stacks.buffers, held, strict=True):
        expected = old.clone()
        for row in range(2):  # reads before it writes: 5 is moved and overwritten
            expected[:, row, :, target[row]] = old[:, row, :, source[row]]
        assert torch.equal(now, expected)
