"""The rule `path`: whole denoising paths are judged, of which draft and target share the start."""

from __future__ import annotations

from ragspec.visual.latents.rules.coupling import Coupled


class Path(Coupled):
    """Couple whole paths of draft and target; the text follows the target's law.

    Every step is judged on the draft's own states, so that a forward of the head over all of them
    at once is all that it takes.
    """

    name = "path"

    def steps(self, most: int) -> int:
        """Return T."""
        return most
