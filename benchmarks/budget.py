"""Budget policies on a simulated clock: forwards, drafts and look-ups take fixed times.

    python benchmarks/budget.py [--data DIR] [--scenarios quote,free] [--machines quiet]

No wall clock and no model is used. Fixed texts replace the target (see `harness.replay`). Drafters
and policy are real. A machine (see `harness.clock`) gives the policy the times, with noise,
outliers, neighbours that take half of the time, or a cost curve that was measured wrong at
start-up. The score of a policy is the time of its decisions on the quiet machine, against plain
decoding. A policy starts untrained in each scenario and learns from text to text. "of best" is the
speed of the free budget by the best of plain decoding and the fixed budgets, also with fewer
drafters. A budget counts positions of a forward, the root included, as in probe.py. DIR holds the
evaluation data; without it the script uses the bundled guide. All figures are simulated.
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

from harness.clock import Machine, PricedDrafter, SimulatedModel
from harness.replay import Replay, ReplayText
from machines import FLAT, HOST, LONG, MACHINES, RISING, STEP, Setting
from replay_texts import TEXTS, bundled_texts, real_answers, shared_texts

from ragspec.budget.base import BudgetPolicy
from ragspec.budget.cost_curve import CostCurve
from ragspec.budget.policy import AutoBudget, FixedBudget
from ragspec.drafters.base import Drafter
from ragspec.drafters.fuse import Fuse
from ragspec.drafters.method import Sources
from ragspec.models.load import load_model
from ragspec.pipelines.methods import build_method
from ragspec.retrievers.methods.context import ContextDrafter

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
FIXED = (4, 8, 13, 16, 32)
Build = Callable[[Machine], list[Drafter]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Texts, drafters, and the true costs of forwards.

    Attributes:
        others: Alternatives with fewer drafters.
        nothing: Whether drafting gains nothing, so that plain decoding is the reference.
    """

    name: str
    texts: list[ReplayText]
    build: Build
    truth: CostCurve = RISING
    others: tuple[Build, ...] = ()
    nothing: bool = False


def context(machine: Machine) -> list[Drafter]:
    """Return the context drafter alone, with the cost of its look-ups."""
    return [PricedDrafter(ContextDrafter(), machine, 0.00005, 0.000006)]


def model(
    texts: Iterable[ReplayText],
    right: float | Mapping[tuple[int, ...], float],
    node: float,
    beside: Build | None = None,
    call: float = 0.02,
) -> Build:
    """Return a builder of a simulated draft model, alone or beside other drafters.

    Args:
        texts: Texts to draft.
        right: Mean share of right tokens, for all prompts or by prompt.
        node: Cost of a node as a share of a plain forward.
        beside: Builder of further drafters.
        call: Cost of a draft as a share of a plain forward.
    """
    simulated = SimulatedModel({text.prompt: text.text for text in texts}, right)

    def build(machine: Machine) -> list[Drafter]:
        plain = machine.truth.seconds(1, 1)
        alone = PricedDrafter(simulated, machine, call * plain, node * plain)
        return [*(beside(machine) if beside else ()), alone]

    return build


def with_learning(texts: Iterable[ReplayText], right: float, teach: float) -> Build:
    """Return a builder of the context and a source that learns at a cost in every step."""
    simulated = SimulatedModel(
        {text.prompt: text.text for text in texts}, right, "learning", seed=7
    )

    def build(machine: Machine) -> list[Drafter]:
        plain = machine.truth.seconds(1, 1)
        other = PricedDrafter(simulated, machine, 0.01 * plain, 0.001 * plain, teach * plain)
        return [*context(machine), other]

    return build


def scenarios(texts: Mapping[str, list[ReplayText]], sources: Sources) -> list[Scenario]:
    """Return all scenarios.

    Args:
        texts: Texts by kind: quote, answer, free, summary, and optionally real.
        sources: Stores of the real texts.
    """
    quote, answer, free = texts["quote"], texts["answer"], texts["free"]
    mixed = [*answer, *free, *quote]
    random.Random(0).shuffle(mixed)
    mixed, third = mixed[:TEXTS], len(free) // 3
    changing = [*free[:third], *quote[third:]]
    rates = {each.prompt: 0.1 if i < third else 0.85 for i, each in enumerate(changing)}
    alone = (context,)
    every = [
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
        Scenario("model alone that turns good", changing, model(changing, rates, 0.06)),
        Scenario("10 % model alone", free, model(free, 0.1, 0.1), nothing=True),
        Scenario("dear model alone", free, model(free, 0.8, 0.9), nothing=True),
        Scenario("context + good model", mixed, model(mixed, 0.85, 0.06, context), others=alone),
        Scenario("context + 45 % model", mixed, model(mixed, 0.45, 0.1, context), others=alone),
        Scenario("context + dear model", mixed, model(mixed, 0.8, 0.9, context), others=alone),
        Scenario("context + useful taught", mixed, with_learning(mixed, 0.5, 0.05), others=alone),
        Scenario("context + useless taught", mixed, with_learning(mixed, 0.1, 0.15), others=alone),
    ]
    if "real" in texts:
        real = texts["real"]
        every.append(Scenario("real answer", real, context))
        every.append(Scenario("real answer, flat costs", real, context, FLAT))
        for method in ("suffix", "hierarchy", "auto"):
            every.append(Scenario(f"real answer, {method}", real, stored(method, sources)))
    return every


def stored(method: str, sources: Sources) -> Build:
    """Return a builder of a method that drafts from stores, with the cost of look-ups."""

    def build(machine: Machine) -> list[Drafter]:
        drafter: Any = build_method(method, sources)
        drafters = drafter.drafters if isinstance(drafter, Fuse) else [drafter]
        return [PricedDrafter(each, machine, 0.0001, 0.000006) for each in drafters]

    return build


@dataclass(slots=True)
class PlayResult:
    """Quiet seconds, and mean tokens and positions of a step, of one policy in a scenario."""

    seconds: float
    tokens_per_step: float
    nodes: float


def play(
    scenario: Scenario, policy: BudgetPolicy, build: Build | None, machine: Machine, vocab_size: int
) -> PlayResult:
    """Replay all texts of a scenario with one policy."""
    replay = Replay(build(machine) if build else None, policy, vocab_size, machine)
    for text in scenario.texts:
        replay.play(text)
    return PlayResult(machine.quiet, replay.counts.tokens_per_step, replay.counts.nodes)


def run(
    scenario: Scenario,
    settings: Mapping[str, Setting],
    vocab_size: int,
    seed: int = 0,
    policy: Callable[[], BudgetPolicy] = AutoBudget,
) -> dict[str, Any]:
    """Return one row: speedups over plain decoding at each budget and on each machine."""

    def quiet() -> Machine:
        return Machine(scenario.truth, host=HOST, belief=copy.deepcopy(scenario.truth))

    plain = play(scenario, FixedBudget(0), None, quiet(), vocab_size).seconds
    fixed, best = {}, 1.0
    for build in (scenario.build, *scenario.others):
        for size in FIXED:
            outcome = play(scenario, FixedBudget(size - 1), build, quiet(), vocab_size)
            fixed.setdefault(size, round(plain / outcome.seconds, 4))
            best = max(best, plain / outcome.seconds)
    auto = {}
    for name, setting in settings.items():
        belief = None if setting.belief is None else setting.belief(scenario.truth)
        machine = Machine(scenario.truth, setting.disturbance, host=HOST, belief=belief, seed=seed)
        outcome = play(scenario, policy(), scenario.build, machine, vocab_size)
        auto[name] = {
            "to_plain": round(plain / outcome.seconds, 4),
            "of_best": round(plain / outcome.seconds / best, 4),
            "tokens_per_step": round(outcome.tokens_per_step, 3),
            "nodes": round(outcome.nodes, 2),
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
    """Return the speedups of all budgets, and the free budget's share of the best, as a table."""
    machines = list(rows[0]["auto"])
    first = machines[0]
    columns = [*(f"fixed {size}" for size in FIXED), "auto", "tokens a forward", *machines]
    lines = [
        "Simulated seconds: speedup over plain decoding, and the free budget's share of the best.",
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
    """Replay the scenarios, print the table and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument(
        "--scenarios", default="", help="prefixes of names, comma-separated; default: all"
    )
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--texts", type=int, default=TEXTS, help="most texts of a scenario")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loaded, tokenizer = load_model("starter")
    vocab_size = int(loaded.config.vocab_size)
    settings = {name: MACHINES[name] for name in options.machines.split(",")}
    prefixes = tuple(name.strip() for name in options.scenarios.split(","))
    has_data, sources = options.data.is_dir(), Sources()
    texts = shared_texts(options.data, tokenizer) if has_data else bundled_texts(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        if has_data:
            probe = options.data / "probe"
            texts["real"], sources = real_answers(probe, Path(folder), vocab_size)
        texts = {kind: group[: options.texts] for kind, group in texts.items()}
        rows = [
            run(scenario, settings, vocab_size, options.seed)
            for scenario in scenarios(texts, sources)
            if scenario.name.startswith(prefixes)
        ]
    print(table(rows))
    if options.json:
        facts = {"simulated": True, "seed": options.seed, "evaluation_data": has_data}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
