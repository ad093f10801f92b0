"""How often a step that has no fixed shape waits for an accelerator: not more often than it did."""

import pytest

from ragspec.engine.engine import Engine
from ragspec.sampling.settings import Sampling
from ragspec.verification.open import open_target
from tests.support import tiny
from tests.support.pretend import Pretend, pretend
from tests.support.pretend_steps import Bushes, count_steps

SETTINGS = {
    "greedy": Sampling(),
    "top-p": Sampling(temperature=0.2, top_p=0.9, seed=3),
    "all": Sampling(temperature=0.9, top_k=60, top_p=0.9, repetition_penalty=1.1, seed=3),
}
CEILINGS = {
    (0, 1, "greedy"): 2,
    (0, 16, "greedy"): 4,
    (15, 1, "greedy"): 4,
    (15, 16, "greedy"): 7,
    (0, 1, "top-p"): 4,
    (0, 16, "top-p"): 36,
    (15, 1, "top-p"): 6,
    (15, 16, "top-p"): 37,
    (15, 16, "all"): 38,
}


@pytest.mark.parametrize(("nodes", "rows", "name"), CEILINGS)
def test_no_step_waits_more_often_than_it_did(nodes: int, rows: int, name: str) -> None:
    prompts = [tiny.prompt(9, seed=seed) for seed in range(rows)]
    with Pretend() as device:
        drafter = Bushes(nodes, tiny.VOCAB) if nodes else None
        target = open_target(pretend(tiny.model("llama")), "off")
        engine = Engine(target, drafter=drafter, budget=nodes or 1)
        steps = count_steps(device, engine, prompts, SETTINGS[name])
    assert steps.waits <= CEILINGS[nodes, rows, name], f"{steps.waits} waits\n{steps}"
