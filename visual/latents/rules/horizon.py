"""The rule `horizon`: the last s denoising steps are judged as one path."""

from __future__ import annotations

from ragspec.errors import InputError
from ragspec.visual.checks import whole
from ragspec.visual.latents.rules.coupling import Coupled


class Horizon(Coupled):
    """Couple the last s denoising steps of draft and target; the text follows the target's law.

    Between `aligned` (s = 1) and `path` (s = T): an early difference of the states costs less the
    earlier the paths are compared, and each step that is compared costs some. Raises InputError.
    """

    name = "horizon"

    def __init__(self, s: int = 4) -> None:
        number = whole(s)
        if number is None or number < 1:
            raise InputError(f"got s {s!r}; expected at least 1 denoising step, a whole number.")
        self.s = number

    def steps(self, most: int) -> int:
        """Return s, or T where there are fewer."""
        return min(self.s, most)
