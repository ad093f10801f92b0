"""`ragspec draw`: images from a prompt or a class, plain or speculative."""

from __future__ import annotations

from pathlib import Path

from ragspec.errors import InputError
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.image_options import (
    BandOption,
    ClassOption,
    CountOption,
    DeltaOption,
    DrawCompareOption,
    DrawSeedOption,
    FiguresOption,
    FloorOption,
    FolderOption,
    GainOption,
    GuidanceOption,
    HeatOption,
    HorizonOption,
    ImageDrafterOption,
    ImageOption,
    IterationsOption,
    KeepOption,
    LamOption,
    MaskOption,
    NeighboursOption,
    OutOption,
    PromptArgument,
    RadiusOption,
    RuleOption,
    RulesOption,
    SetOption,
    SheetOption,
    StepsOption,
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
    band: BandOption = None,
    tv_budget: TVBudgetOption = None,
    least_gain: GainOption = None,
    r: RadiusOption = None,
    s: HorizonOption = None,
    iterations: IterationsOption = None,
    steps: StepsOption = None,
    floor: FloorOption = None,
    budget: o.BudgetOption = "12",
    n: CountOption = 1,
    seed: DrawSeedOption = None,
    guidance: GuidanceOption = 2.0,
    temperature: HeatOption = 1.0,
    top_k: KeepOption = 0,
    image: ImageOption = None,
    mask: MaskOption = None,
    out: OutOption = None,
    compare: DrawCompareOption = False,
    sheet: SheetOption = None,
    rules: RulesOption = None,
    json: FiguresOption = None,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
) -> None:
    """Draw images from a prompt or a class, with or without speculation."""
    from ragspec.pipelines.cli.draw_run import draw_images
    from ragspec.pipelines.cli.draw_sheet import draw_sheet
    from ragspec.pipelines.cli.drawn import Asked
    from ragspec.pipelines.console.terminal import Terminal

    asked = Asked(
        prompts=tuple(o.checked_text(each) for each in prompt or ()),
        classes=tuple(classes or ()),
        image_set=image_set,
        model=model,
        drafter=() if drafter == "none" else tuple(drafter.split("+")),
        rule=rule,
        settings=dict(
            neighbours=neighbours,
            delta=delta,
            lam=lam,
            band=band,
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
        rules=tuple(name.strip() for name in (rules or "").split(",") if name.strip()),
        image=image,
        mask=mask,
        denoising=dict(iterations=iterations, steps=steps, floor=floor),
    )
    if sheet is None and rules is not None:
        raise InputError("got --rules without --sheet; expected --sheet FILE.png with it.")
    if sheet is None:
        draw_images(asked, out or Path("drawn"), json, compare, Terminal())
    elif compare or out or json:
        raise InputError(
            "got --sheet and --compare, --out or --json; expected --sheet alone: plain drawing is "
            "its first column, and its JSON file lies beside it."
        )
    else:
        draw_sheet(asked, sheet, Terminal())
