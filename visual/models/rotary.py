"""Rotary positions of a square grid of codes behind a condition, as LlamaGen has them.

Sun et al., "Autoregressive Model Beats Diffusion" (arXiv 2406.06525): half of each head turns with
the row of the code, half with its column, neighbouring numbers forming the pairs. Positions of the
condition have a table of zeros, so their queries and keys vanish: every code attends to the
condition with logit 0, whatever its distance.
"""

from __future__ import annotations

import torch

SPARE = 64  # positions beyond the last code: forwards that are only timed may reach there


class GridRotary:
    """Tables of rotations for L condition positions and the side * side codes behind them.

    width: of a head, a multiple of 4. theta: base of the angular speeds.
    """

    def __init__(self, condition_length: int, side: int, width: int, theta: float = 1e4) -> None:
        self.condition_length = condition_length
        self.side = side
        self.width = width
        self.theta = theta
        self._tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def __len__(self) -> int:
        """Return the number of positions, L + side * side."""
        return self.condition_length + self.side * self.side

    def rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rotations at positions i64 [B, n]: complex [B, n, 1, width / 2].

        dtype: of the states that will be turned; half precision is turned in float32.
        """
        number = torch.complex128 if dtype == torch.float64 else torch.complex64
        key = (positions.device, number)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._table().to(positions.device, number)
        return table[positions]

    def _table(self) -> torch.Tensor:
        """Return complex128 [L + side * side + SPARE, 1, width / 2]."""
        quarter = self.width // 4
        speeds = self.theta ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
        places = torch.arange(self.side**2 + SPARE)
        rows = (places // self.side)[:, None] * speeds
        grid = torch.cat([rows, (places % self.side)[:, None] * speeds], dim=-1)
        turned = torch.polar(torch.ones_like(grid), grid)
        still = torch.zeros(self.condition_length, 2 * quarter, dtype=turned.dtype)
        return torch.cat([still, turned])[:, None]


def rotate(states: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring pairs of numbers; states [B, n, heads, width], of any float dtype."""
    work = torch.promote_types(states.dtype, torch.float32)
    pairs = torch.view_as_complex(states.to(work).reshape(*states.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(states.dtype)
