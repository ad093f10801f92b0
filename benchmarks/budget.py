"""Budget policies on a simulated clock: every forward, draft and look-up takes a set time.

    python benchmarks/budget.py [--data DIR] [--scenarios quote,free] [--machines quiet]

No wall clock is read and no model runs: known texts play the target (see
`harness.replay`), drafters really draft, the policy really decides, and a machine
(see `harness.clock`) tells it what that took, with noise, outliers, neighbours
that take half of the time, or a cost curve that was read wrong at start-up. Policies are scored by
what their decisions take on the quiet machine, against plain decoding. Each starts cold and keeps
what it learns for all texts of a scenario. "of best" is the free budget over the best of plain
decoding and the fixed budgets, drafters left out included. A budget counts positions of a forward,
the root included, as in probe.py. DIR holds the evaluation data; without it the guide that ships
with the project is used. All figures are simulated.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness.clock import Guesser, Machine, Priced
from harness.replay import Known, Replay
from known import TEXTS, bundled_texts, real_answers, shared_texts
from machines import FLAT, HOST, LONG, MACHINES, RISING, STEP, Setting

from ragspec.budget.base import BudgetPolicy
from ragspec.budget.cost_curve import CostCurve
from ragspec.budget.policy import AutoBudget, FixedBudget
from ragspec.drafters.base import Drafter
from ragspec.drafters.fuse import Fuse
from ragspec.models.load import load_model
from ragspec.pipelines.methods import Sources, build_method
from ragspec.retrievers.methods.context import ContextDrafter

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
FIXED = (4, 8, 13, 16, 32)
Build = Callable[[Machine], list[Drafter]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Texts, the true costs of forwards, and drafters; others: what may also be had without some.

    nothing: there is nothing to gain, so that plain decoding is what counts.
    """

    name: str
    texts: list[Known]
    build: Build
    truth: CostCurve = RISING
    others: tuple[Build, ...] = ()
    nothing: bool = False


def context(machine: Machine) -> list[Drafter]:
    """Return the context alone, at the price of its look-ups."""
    return [Priced(ContextDrafter(), machine, 0.00005, 0.000006)]


def model(
    texts: Iterable[Known],
    right: float | Mapping[tuple[int, ...], float],
    node: float,
    beside: Build | None = None,
    call: float = 0.02,
) -> Build:
    """Return what makes a draft model: right so often, at shares of a plain forward."""
    guesser = Guesser({known.prompt: known.text for known in texts}, right)

    def build(machine: Machine) -> list[Drafter]:
        plain = machine.truth.seconds(1, 1)
        alone = Priced(guesser, machine, call * plain, node * plain)
        return [*(beside(machine) if beside else ()), alone]

    return build


def taught(texts: Iterable[Known], right: float, teach: float) -> Build:
    """Return the context and a source that has to be taught, for a share of every plain forward."""
    guesser = Guesser({known.prompt: known.text for known in texts}, right, "taught", seed=7)

    def build(machine: Machine) -> list[Drafter]:
        plain = machine.truth.seconds(1, 1)
        other = Priced(guesser, machine, 0.01 * plain, 0.001 * plain, teach * plain)
        return [*context(machine), other]

    return build


def scenarios(texts: Mapping[str, list[Known]], sources: Sources) -> list[Scenario]:
    """Return all scenarios over texts by kind: quote, answer, free and summary, perhaps real.

    sources: stores that go with the real ones.
    """
    quote, answer, free = texts["quote"], texts["answer"], texts["free"]
    mixed = [*answer, *free, *quote]
    random.Random(0).shuffle(mixed)
    mixed, third = mixed[:TEXTS], len(free) // 3
    turning = [*free[:third], *quote[third:]]
    becoming = {each.prompt: 0.1 if i < third else 0.85 for i, each in enumerate(turning)}
    alone = (context,)
    results = [
        Scenario("quote", quote, context),
        Scenario("quote, flat costs", quote, context, FLAT),
        Scenario("answer", answer, context),
        Scenario("answer, costs with a step", answer, context, STEP),
        Scenario("mixed", mixed, context),
        Scenario("free", free, context, nothing=True),
        Scenario("free, costs with a step", free, context, STEP, nothing=True),
        Scenario("summary of a long text", texts["summary"], context, LONG, nothing=True),
        Scenario("good model alone", quote, model(quote, 0.85, 0.06)),
        Scenario("45 % model alone", quote, model(quote, 0.45, 0.1)),
        Scenario("45 % model alone, dear nodes", quote, model(quote, 0.45, 0.14)),
        Scenario("45 % model alone, dear calls", quote, model(quote, 0.45, 0.02, call=0.25)),
        Scenario("model alone that turns good", turning, model(turning, becoming, 0.06)),
        Scenario("10 % model alone", free, model(free, 0.1, 0.1), nothing=True),
        Scenario("dear model alone", free, model(free, 0.8, 0.9), nothing=True),
        Scenario("context + good model", mixed, model(mixed, 0.85, 0.06, context), others=alone),
        Scenario("context + 45 % model", mixed, model(mixed, 0.45, 0.1, context), others=alone),
        Scenario("context + dear model", mixed, model(mixed, 0.8, 0.9, context), others=alone),
        Scenario("context + useful taught", mixed, taught(mixed, 0.5, 0.05), others=alone),
        Scenario("context + useless taught", mixed, taught(mixed, 0.1, 0.15), others=alone),
    ]
    if "real" in texts:
        real = texts["real"]
        results.append(Scenario("real answer", real, context))
        results.append(Scenario("real answer, flat costs", real, context, FLAT))
        for method in ("suffix", "hierarchy", "auto"):
            results.append(Scenario(f"real answer, {method}", real, stored(method, sources)))
    return results


def stored(method: str, sources: Sources) -> Build:
    """Return what makes a method that drafts from stores, at the price of look-ups in them."""

    def build(machine: Machine) -> list[Drafter]:
        instance: Any = build_method(method, sources)
        held = instance.drafters if isinstance(instance, Fuse) else [instance]
        return [Priced(each, machine, 0.0001, 0.000006) for each in held]

    return build


@dataclass(slots=True)
class Played:
    """What one policy made of a scenario: quiet seconds, and tokens a forward after the prompts'"""

    seconds: float
    tokens_per_step: float
    nodes: float


def play(
    scenario: Scenario, policy: BudgetPolicy, build: Build | None, machine: Machine, vocab_size: int
) -> Played:
    """Play all texts of a scenario to one policy."""
    replay = Replay(build(machine) if build else None, policy, vocab_size, machine)
    for known in scenario.texts:
        replay.play(known)
    return Played(machine.quiet, replay.result.tokens_per_step, replay.result.nodes)


def run(
    scenario: Scenario,
    settings: Mapping[str, Setting],
    vocab_size: int,
    seed: int = 0,
    policy: Callable[[], BudgetPolicy] = AutoBudget,
) -> dict[str, Any]:
    """Return one row: speeds against plain decoding at each budget and on each machine."""

    def quiet() -> Machine:
        return Machine(scenario.truth, host=HOST, belief=copy.deepcopy(scenario.truth))

    plain = play(scenario, FixedBudget(0), None, quiet(), vocab_size).seconds
    fixed, best = {}, 1.0
    for build in (scenario.build, *scenario.others):
        for size in FIXED:
            instance = play(scenario, FixedBudget(size - 1), build, quiet(), vocab_size)
            fixed.setdefault(size, round(plain / instance.seconds, 4))
            best = max(best, plain / instance.seconds)
    auto = {}
    for name, setting in settings.items():
        belief = None if setting.belief is None else setting.belief(scenario.truth)
        machine = Machine(scenario.truth, setting.disturbance, host=HOST, belief=belief, seed=seed)
        instance = play(scenario, policy(), scenario.build, machine, vocab_size)
        auto[name] = {
            "to_plain": round(plain / instance.seconds, 4),
            "of_best": round(plain / instance.seconds / best, 4),
            "tokens_per_step": round(instance.tokens_per_step, 3),
            "nodes": round(instance.nodes, 2),
        }
    return {
        "scenario": scenario.name,
        "nothing": scenario.nothing,
        "texts": len(scenario.texts),
        "fixed": fixed,
        "best": round(best, 4),
        "auto": auto,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the speeds of all budgets, and how near the free one comes to the best."""
    machines = list(rows[0]["auto"])
    first = machines[0]
    columns = [*(f"fixed {size}" for size in FIXED), "auto", "tokens a forward", *machines]
    lines = [
        "Simulated seconds: speed against plain decoding, and the free budget's of the best.",
        f"| scenario | {' | '.join(columns)} |",
        "| --- " * (len(columns) + 1) + "|",
    ]
    for row in rows:
        cells = [f"{row['fixed'][size]:.2f}" for size in FIXED]
        cells += [f"{row['auto'][first]['to_plain']:.2f}"]
        cells += [f"{row['auto'][first]['tokens_per_step']:.2f}"]
        cells += [f"{row['auto'][name]['of_best']:.3f}" for name in machines]
        lines.append(f"| {row['scenario']} | {' | '.join(cells)} |")
    for name, of in (("worst", min), ("median", median)):
        cells = [f"{of([row['auto'][m]['of_best'] for row in rows]):.3f}" for m in machines]
        lines.append(f"| **{name}** | {' | ' * (len(FIXED) + 1)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Play the scenarios that were asked for, print the table and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--scenarios", default="", help="beginnings of names; all without it")
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--texts", type=int, default=TEXTS, help="texts a scenario")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loaded, tokenizer = load_model("starter")
    vocab_size = int(loaded.config.vocab_size)
    settings = {name: MACHINES[name] for name in options.machines.split(",")}
    selection = tuple(name.strip() for name in options.scenarios.split(","))
    there, sources = options.data.is_dir(), Sources()
    texts = shared_texts(options.data, tokenizer) if there else bundled_texts(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        if there:
            probe = options.data / "probe"
            texts["real"], sources = real_answers(probe, Path(folder), vocab_size)
        texts = {kind: selected[: options.texts] for kind, selected in texts.items()}
        rows = [
            run(scenario, settings, vocab_size, options.seed)
            for scenario in scenarios(texts, sources)
            if scenario.name.startswith(selection)
        ]
    print(table(rows))
    if options.json:
        facts = {"simulated": True, "seed": options.seed, "evaluation_data": there}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
