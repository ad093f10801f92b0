"""Rules over latents by name, and the rule `near`.

`near` keeps a draft close to the target's own latent of the same noise. It is `walk` over latents:
it needs no density, and with r = 0 the image equals that of plain decoding.
"""

from collections.abc import Callable

import torch

from ragspec.errors import UnknownNameError
from ragspec.registry import unknown
from ragspec.reports.report import ROUNDED
from ragspec.rules.base import Rule
from ragspec.visual.checks import RULE_SETTINGS, check_setting, check_settings
from ragspec.visual.latents.rules.cspd import Aligned, Horizon, LatentRule, Path
from ragspec.visual.latents.target import LatentView


class Near(LatentRule):
    """Keeps a draft within r of the target's own latent, which has the same noise.

    Args:
        r: Euclidean distance of 0 or more, in deviations of the latents. 0 gives the image of plain
            decoding.
    """

    name = "near"

    def __init__(self, r: float = 0.02) -> None:
        check_setting("r", r)
        self.r = r

    @property
    def label(self) -> str:
        """`exact up to rounding` if only equal latents are kept, else `approximate`."""
        return "approximate" if self.r else f"exact{ROUNDED}"

    def _emit(self, view: LatentView, index: int, drafted: int, sampled: int) -> int:
        latents = view.target.table.latents
        difference = torch.linalg.vector_norm(latents[drafted] - latents[sampled])
        return drafted if float(difference) <= self.r else sampled


RULES: dict[str, Callable[..., Rule]] = {rule.name: rule for rule in (Near, Aligned, Horizon, Path)}


def make_latent_rule(name: str, **settings: object) -> Rule:
    """Return a rule over latents by its name.

    Args:
        settings: r of "near", s of "horizon"; None stands for the default.

    Raises:
        UnknownNameError: There is no such rule.
        InputError: The rule has no such setting.
    """
    if name not in RULES:
        raise UnknownNameError(unknown("latent rule", name, list(RULES)))
    inputs = {key: value for key, value in settings.items() if value is not None}
    check_settings(name, inputs, {*RULE_SETTINGS[name]})
    return RULES[name](**inputs)
