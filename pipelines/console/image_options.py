"""The options that the commands about images share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SetOption = Annotated[
    str | None,
    typer.Option(
        "--set",
        help="A bundled set: emoji, latent-emoji (prompts), tiles, latent-tiles or masked-tiles "
        "(classes).",
    ),
]


RuleOption = Annotated[
    str | None,
    typer.Option(
        help="exact, lantern, lantern++, even, gsd, cool, rejection, lantern-rejection, ...; of "
        "latents near, aligned, horizon, path, cspd-paper, cspd-repo. Without it exact, of latents "
        "aligned."
    ),
]


RadiusOption = Annotated[
    float | None, typer.Option("--r", min=0.0, help="How far a latent may be from near's own.")
]


HorizonOption = Annotated[
    int | None, typer.Option("--s", min=1, help="Denoising steps that horizon couples.")
]


StepsOption = Annotated[
    int | None, typer.Option(min=1, help="Denoising steps of a latent; its model's own without.")
]


FloorOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Least noise of a denoising step of latents; of masked ones, of the last step alone.",
    ),
]


PrefillOption = Annotated[
    float,
    typer.Option(min=0.0, help="Share of masked latents that are drawn before drafting begins."),
]


IterationsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Forwards of a masked model without drafts, 64 or one a latent."),
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


BandOption = Annotated[
    float | None,
    typer.Option(min=0.0, help="Nats by which even may change how likely a picture is."),
]


TVBudgetOption = Annotated[
    float | None, typer.Option(min=0.0, help="Total variation that one image may spend.")
]


GainOption = Annotated[
    float | None,
    typer.Option(min=0.0, help="Relax only where the draft promises so many more codes."),
]


PromptArgument = Annotated[
    list[str] | None, typer.Argument(help="What to draw, such as 'red heart'; several are too.")
]


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
    Path | None,
    typer.Option("--out", "-o", help="Folder for the images; drawn/ if absent.", file_okay=False),
]


ImageOption = Annotated[
    Path | None,
    typer.Option("--image", help="A picture of which a part is kept; see --mask.", dir_okay=False),
]


MaskOption = Annotated[
    Path | None,
    typer.Option(
        "--mask",
        help="As large as --image, or a pixel a code: white is drawn anew, black is kept. Codes "
        "follow one another row by row, so what is kept steers only what comes after it.",
        dir_okay=False,
    ),
]


RulesOption = Annotated[
    str | None,
    typer.Option(
        "--rules",
        help="Columns of --sheet, comma-separated: RULE[@VALUE][:DRAFTER], sjd, scd; of latents "
        "also fewer@N. As the ways of bench image.",
    ),
]


SheetOption = Annotated[
    Path | None,
    typer.Option(
        "--sheet",
        help="Draw prompts or classes by rules on one picture with all figures: this PNG, and a "
        "JSON file and a page (HTML) of the same name beside it.",
        dir_okay=False,
    ),
]


DrawCompareOption = Annotated[
    bool, typer.Option("--compare", help="Draw plainly too: both times, side by side.")
]


FiguresOption = Annotated[
    Path | None, typer.Option("--json", help="Write the figures here.", dir_okay=False)
]
