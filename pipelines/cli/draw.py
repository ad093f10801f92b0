"""`ragspec draw`: images from a prompt or a class, plain or speculative."""

from __future__ import annotations

from pathlib import Path

from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.image_options import (
    ClassOption,
    CountOption,
    DeltaOption,
    DrawCompareOption,
    DrawSeedOption,
    FiguresOption,
    FolderOption,
    GainOption,
    GuidanceOption,
    HeatOption,
    HorizonOption,
    ImageDrafterOption,
    KeepOption,
    LamOption,
    NeighboursOption,
    OutOption,
    PromptArgument,
    RadiusOption,
    RuleOption,
    SetOption,
    TVBudgetOption,
)


def draw(
    prompt: PromptArgument = None,
    classes: ClassOption = None,
    image_set: SetOption = None,
    model: FolderOption = None,
    drafter: ImageDrafterOption = "auto",
    rule: RuleOption = None,
    neighbours: NeighboursOption = None,
    delta: DeltaOption = None,
    lam: LamOption = None,
    tv_budget: TVBudgetOption = None,
    least_gain: GainOption = None,
    r: RadiusOption = None,
    s: HorizonOption = None,
    budget: o.BudgetOption = "12",
    n: CountOption = 1,
    seed: DrawSeedOption = None,
    guidance: GuidanceOption = 2.0,
    temperature: HeatOption = 1.0,
    top_k: KeepOption = 0,
    out: OutOption = Path("drawn"),
    compare: DrawCompareOption = False,
    json: FiguresOption = None,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
) -> None:
    """Draw images from a prompt or a class, with or without speculation."""
    from ragspec.pipelines.cli.draw_run import draw_images
    from ragspec.pipelines.cli.drawn import Asked
    from ragspec.pipelines.console.terminal import Terminal

    asked = Asked(
        prompt=prompt if prompt is None else o.checked_text(prompt),
        classes=tuple(classes or ()),
        image_set=image_set,
        model=model,
        drafter=() if drafter == "none" else tuple(drafter.split("+")),
        rule=rule,
        settings=dict(
            neighbours=neighbours,
            delta=delta,
            lam=lam,
            tv_budget=tv_budget,
            least_gain=least_gain,
            r=r,
            s=s,
        ),
        budget=o.budget_of(budget),
        count=n,
        seed=seed,
        guidance=guidance,
        temperature=temperature,
        top_k=top_k,
        device=device,
        dtype=dtype,
    )
    draw_images(asked, out, json, compare, Terminal())
