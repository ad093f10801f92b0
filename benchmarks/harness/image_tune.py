"""`bench.py image --tune`: the settings of a relaxed rule that a model should ship with.

The tuning saves the setting of a grid with the most codes a forward among those at hardly any cost.
Such a setting has an NLL gap that with its standard error stays within 0.02 nats of 0, and a
tv_excess of at most 0.05 a code. About 192 images are enough. With fewer images the error is too
large, and of many settings some would pass by luck. Forwards decide, not seconds, so that a busy
machine writes the same file.
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

    from harness.image_options import ImageBenchOptions

MOST_EXCESS = 0.05
MOST_NLL_GAP = 0.02  # nats a code, standard error included
GRIDS: dict[str, dict[str, Sequence[float]]] = {
    "lantern": {"neighbours": (10, 40, 160), "delta": (0.1, 0.2, 0.3, 0.4, 0.5)},
    "lantern++": {"neighbours": (5, 10), "lam": (1.5, 2.0, 3.0, 5.0)},
}


@dataclass(frozen=True, slots=True)
class Trial:
    """The figures of one setting over `images` images."""

    settings: dict[str, Any]
    codes_per_forward: float
    nll_gap: float
    error: float
    tv_excess: float
    images: int

    @property
    def is_free(self) -> bool:
        """Whether both figures are small, errors included."""
        small = abs(self.nll_gap) + self.error <= MOST_NLL_GAP
        return small and self.tv_excess <= MOST_EXCESS


def tune(
    options: ImageBenchOptions, rule: str, progress: Callable[[str], None]
) -> tuple[list[Trial], Trial | None, Path]:
    """Try all settings of a rule and save the best one; write nothing if none is free.

    Returns:
        All trials, the best one, and the path of the file.

    Raises:
        InputError: The rule is unknown, or the model has no folder.
    """
    from ragspec.visual.loading import RELAXATION, find_folder

    if rule not in GRIDS:
        raise InputError(f"Expected --tune {' or '.join(GRIDS)}, got {rule}. Choose one of them.")
    folder = find_folder(options.source)
    inside = folder.target.name == "target"
    path = (folder.target.parent if inside else folder.target) / RELAXATION
    trials = _run_trials(options, rule, progress)
    free = [trial for trial in trials if trial.is_free]
    best = max(free, key=lambda trial: trial.codes_per_forward, default=None)
    if best is not None:
        figures = {key: value for key, value in asdict(best).items() if key != "settings"}
        save_settings(path, rule, best.settings, figures | {"guidance": options.guidance})
    return trials, best, path


def save_settings(
    path: Path, rule: str, settings: dict[str, Any], measured: dict[str, Any]
) -> None:
    """Add the settings of a rule and their figures to the file of a model."""
    from ragspec.visual.loading import FORMAT

    record: dict[str, Any] = {"format": FORMAT, "rules": {}}
    if path.exists():
        record = json_text.loads(path.read_text(encoding="utf-8"))
    record["rules"][rule] = {"settings": settings, "measured": measured}
    path.write_text(json_text.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _run_trials(
    options: ImageBenchOptions, rule: str, progress: Callable[[str], None]
) -> list[Trial]:
    from harness.image_run import prepare
    from ragspec.visual import ImagePipeline

    ready = prepare(options)
    if ready.latents:
        raise InputError(
            "Expected a model of codes with --tune, got one of continuous latents. Choose another."
        )
    base, grid = ready.base, GRIDS[rule]
    most = int(base.model.config.vocab_size) - 1
    trials = []
    for values in product(*grid.values()):
        settings: dict[str, Any] = dict(zip(grid, values, strict=True))
        if settings["neighbours"] > most:
            continue
        progress(f"{rule}: {', '.join(f'{name} {value:g}' for name, value in settings.items())}")
        pipe = ImagePipeline(
            **base.components,
            drafter="auto",
            rule=rule,
            budget=options.budget,
            batch_size=options.batch_size,
            **settings,
        )
        pipe.set_progress_bar_config(disable=True)
        arguments = ready.series.arguments(list(range(options.images)))
        stats = pipe(**arguments, output_type="latent").stats
        measured = {
            "codes_per_forward": stats.codes_per_forward,
            "nll_gap": stats.nll_gap,
            "error": stats.nll_gap_error,
            "tv_excess": stats.tv_excess,
        }
        figures: dict[str, Any] = {key: round(value, 4) for key, value in measured.items()}
        trials.append(Trial(settings, images=options.images, **figures))
    return trials


def tuning_table(trials: Sequence[Trial], best: Trial | None, title: str) -> Table:
    """Return the table to print; the saved setting is marked."""
    from rich.table import Table

    table = Table(title=title)
    for name in (
        *(trials[0].settings if trials else ()),
        "codes a forward",
        "nll_gap",
        "tv_excess",
    ):
        table.add_column(name, justify="right")
    for trial in trials:
        style = "bold green" if trial is best else None if trial.is_free else "dim"
        table.add_row(
            *(f"{value:g}" for value in trial.settings.values()),
            f"{trial.codes_per_forward:.2f}",
            f"{trial.nll_gap:+.3f} +- {trial.error:.3f}",
            f"{trial.tv_excess:.4f}",
            style=style,
        )
    return table


def run_tuning(options: ImageBenchOptions, rule: str, json: Path | None) -> None:
    """Tune a rule, print the table and the saved settings."""
    from rich.console import Console

    with Console(stderr=True).status("loading") as status:
        trials, best, path = tune(options, rule, status.update)
    console = Console()
    console.print(tuning_table(trials, best, f"{options.source}, {rule}, {options.images} images"))
    if best is None:
        console.print("No setting is free of cost, so no file was written. Try more --images.")
    else:
        console.print(f"Saved {best.settings} in {path}", soft_wrap=True)
    if json is not None:
        rows = [asdict(trial) for trial in trials]
        best_settings = None if best is None else best.settings
        text = json_text.dumps({"rule": rule, "best": best_settings, "rows": rows}, indent=1)
        json.write_text(text + "\n", encoding="utf-8")
