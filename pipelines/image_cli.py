"""The options of `ragspec draw`: images from a prompt or a class, plain or speculative."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.pipelines import options as o

SetOption = Annotated[
    str | None, typer.Option("--set", help="A bundled set: emoji (prompts) or tiles (classes).")
]
RuleOption = Annotated[
    str,
    typer.Option(help="exact, lantern, lantern++, gsd, cool, rejection, lantern-rejection, ..."),
]
ImageDrafterOption = Annotated[
    str, typer.Option(help="auto, starter, head, jacobi, a folder, several joined by +, or none.")
]
GuidanceOption = Annotated[float, typer.Option(min=0.0, help="Scale of guidance; 1 is without.")]
NeighboursOption = Annotated[
    int | None, typer.Option(min=1, help="Near codes that a rule looks at.")
]
DeltaOption = Annotated[
    float | None, typer.Option(min=0.0, help="How far lantern or cool relaxes.")
]
LamOption = Annotated[float | None, typer.Option(min=1.0, help="How far lantern++ relaxes.")]
TVBudgetOption = Annotated[
    float | None, typer.Option(min=0.0, help="Total variation that one image may spend.")
]

GainOption = Annotated[
    float | None,
    typer.Option(min=0.0, help="Relax only where the draft promises so many more codes."),
]

PromptArgument = Annotated[str | None, typer.Argument(help="What to draw, such as 'red heart'.")]
ClassOption = Annotated[
    list[str] | None, typer.Option("--class", "-c", help="A class by number or name; repeatable.")
]
FolderOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A folder with target/, tokenizer/ and draft/."),
]
CountOption = Annotated[
    int, typer.Option("--n", "-n", min=1, help="Images of each prompt or class.")
]
DrawSeedOption = Annotated[
    int | None, typer.Option("--seed", help="The images are a function of it; drawn if absent.")
]
HeatOption = Annotated[
    float, typer.Option("--temperature", "-t", help="0 always takes the likeliest code.")
]
KeepOption = Annotated[int, typer.Option(min=0, help="Keep this many codes; 0 keeps all.")]
OutOption = Annotated[
    Path, typer.Option("--out", "-o", help="Folder for the images.", file_okay=False)
]
DrawCompareOption = Annotated[
    bool, typer.Option("--compare", help="Draw plainly too: both times, side by side.")
]
FiguresOption = Annotated[
    Path | None, typer.Option("--json", help="Write the figures here.", dir_okay=False)
]


def draw(
    prompt: PromptArgument = None,
    classes: ClassOption = None,
    image_set: SetOption = None,
    model: FolderOption = None,
    drafter: ImageDrafterOption = "auto",
    rule: RuleOption = "exact",
    neighbours: NeighboursOption = None,
    delta: DeltaOption = None,
    lam: LamOption = None,
    tv_budget: TVBudgetOption = None,
    least_gain: GainOption = None,
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
    from ragspec.pipelines.drawing import Asked, draw_images
    from ragspec.pipelines.terminal import Terminal

    asked = Asked(
        prompt=prompt if prompt is None else o.checked_text(prompt),
        classes=tuple(classes or ()),
        image_set=image_set,
        model=model,
        drafter=() if drafter == "none" else tuple(drafter.split("+")),
        rule=rule,
        settings=dict(
            neighbours=neighbours, delta=delta, lam=lam, tv_budget=tv_budget, least_gain=least_gain
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
