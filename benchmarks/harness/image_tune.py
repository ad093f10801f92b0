"""`ragspec bench image --tune`: the settings of a relaxed rule that a model should ship with.

Of a grid of settings the one with the most codes a forward is kept, among those that are known to
cost next to nothing: a surprise that with its standard error stays within 0.02 nats of 0, and a
tv_excess of at most 0.05 a code. That takes images enough (192 or so); fewer leave an error that
settles nothing, and of many settings some would pass by luck. Forwards decide and not seconds, so
that a busy machine writes the same file.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from harness.image_asked import ImageBench

MOST_EXCESS = 0.05
MOST_NLL_GAP = 0.02  # nats a code, error included
GRIDS: dict[str, dict[str, Sequence[float]]] = {
    "lantern": {"neighbours": (10, 40, 160), "delta": (0.1, 0.2, 0.3, 0.4, 0.5)},
    "lantern++": {"neighbours": (5, 10), "lam": (1.5, 2.0, 3.0, 5.0)},
}


@dataclass(frozen=True, slots=True)
class Tried:
    """What one setting did, over so many images."""

    settings: dict[str, Any]
    codes_per_forward: float
    nll_gap: float
    error: float
    tv_excess: float
    images: int

    @property
    def costs_nothing(self) -> bool:
        """Whether both figures are known to be small."""
        small = abs(self.nll_gap) + self.error <= MOST_NLL_GAP
        return small and self.tv_excess <= MOST_EXCESS


def tune(
    request: ImageBench, rule: str, progress: Callable[[str], None]
) -> tuple[list[Tried], Tried | None, Path]:
    """Try all settings of a rule; returns them, the best one, and where it was written.

    Nothing is written where no setting is free of cost. Raises InputError for another rule, or a
    model without a folder.
    """
    from ragspec.visual.pipeline.folder import find_folder
    from ragspec.visual.pipeline.relaxation import FILE

    if rule not in GRIDS:
        raise InputError(f"got --tune {rule}; expected one of {', '.join(GRIDS)}.")
    folder = find_folder(request.source)
    whole = folder.target.name == "target"
    path = (folder.target.parent if whole else folder.target) / FILE
    tried = _tried(request, rule, progress)
    free = [each for each in tried if each.costs_nothing]
    best = max(free, key=lambda each: each.codes_per_forward, default=None)
    if best is not None:
        figures = {key: value for key, value in asdict(best).items() if key != "settings"}
        keep(path, rule, best.settings, figures | {"guidance": request.guidance})
    return tried, best, path


def keep(path: Path, rule: str, settings: dict[str, Any], measured: dict[str, Any]) -> None:
    """Write the settings of a rule, and what they were measured to do, beside those of others."""
    from ragspec.visual.pipeline.relaxation import FORMAT

    known: dict[str, Any] = {"format": FORMAT, "rules": {}}
    if path.exists():
        known = json_text.loads(path.read_text(encoding="utf-8"))
    known["rules"][rule] = {"settings": settings, "measured": measured}
    path.write_text(json_text.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _tried(request: ImageBench, rule: str, progress: Callable[[str], None]) -> list[Tried]:
    from harness.image_run import prepare
    from ragspec.visual.pipeline.pipeline import ImagePipeline

    ready = prepare(request)
    if ready.latents:
        raise InputError("got --tune with a model of continuous latents; expected one of codes.")
    base, grid = ready.base, GRIDS[rule]
    most = int(base.model.config.vocab_size) - 1
    results = []
    for values in product(*grid.values()):
        settings: dict[str, Any] = dict(zip(grid, values, strict=True))
        if settings["neighbours"] > most:
            continue
        progress(f"{rule}: {', '.join(f'{name} {value:g}' for name, value in settings.items())}")
        pipe = ImagePipeline(
            **base.components,
            drafter="auto",
            rule=rule,
            budget=request.budget,
            batch_size=request.side_by_side,
            **settings,
        )
        pipe.set_progress_bar_config(disable=True)
        arguments = ready.image_config.arguments(list(range(request.images)))
        stats = pipe(**arguments, output_type="latent").stats
        measured = {
            "codes_per_forward": stats.codes_per_forward,
            "nll_gap": stats.nll_gap,
            "error": stats.nll_gap_error,
            "tv_excess": stats.tv_excess,
        }
        figures: dict[str, Any] = {key: round(value, 4) for key, value in measured.items()}
        results.append(Tried(settings, images=request.images, **figures))
    return results


def tuned_table(tried: Sequence[Tried], best: Tried | None, title: str) -> Table:
    """Return the table that is printed, the setting that was kept marked."""
    from rich.table import Table

    table = Table(title=title)
    for name in (*(tried[0].settings if tried else ()), "codes a forward", "nll_gap", "tv_excess"):
        table.add_column(name, justify="right")
    for each in tried:
        style = "bold green" if each is best else None if each.costs_nothing else "dim"
        table.add_row(
            *(f"{value:g}" for value in each.settings.values()),
            f"{each.codes_per_forward:.2f}",
            f"{each.nll_gap:+.3f} +- {each.error:.3f}",
            f"{each.tv_excess:.4f}",
            style=style,
        )
    return table


def write_tuned(request: ImageBench, rule: str, json: Path | None) -> None:
    """Tune, print the table and say what was written."""

    from rich.console import Console

    with Console(stderr=True).status("loading") as status:
        tried, best, path = tune(request, rule, status.update)
    console = Console()
    console.print(tuned_table(tried, best, f"{request.source}, {rule}, {request.images} images"))
    if best is None:
        console.print(
            "no setting is known to be free of cost: nothing was written. Try more --images."
        )
    else:
        message: dict[str, Any] = best.settings
        console.print(f"kept {message} in {path}", soft_wrap=True)
    if json is not None:
        rows = [asdict(each) for each in tried]
        selected = None if best is None else best.settings
        text = json_text.dumps({"rule": rule, "chosen": selected, "rows": rows}, indent=1)
        json.write_text(text + "\n", encoding="utf-8")
