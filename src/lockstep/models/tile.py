"""How kernels of our own divide a batch among programs. Level 2."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

ALIGNED_CHANNELS = 16
"""Kernels would read the values of others one by one."""


class Tile(NamedTuple):
    """Of [rows, channels]: each program sums some channels of a part of the rows.

    The numbers are those that were fastest on an H200, of a dozen tried for each kernel.
    """

    rows: int
    channels: int
    """Read at once."""
    times: int
    """How often before the loop begins anew: reads that may be under way together."""
    programs: int
    """In all; a multiple of an H200's 132 processors."""

    def parts(self, channels: int) -> int:
        """Into which rows are divided; not by their number, which may be a symbol to the compiler."""
        return max(1, self.programs // -(-channels // self.channels))

    def chunk(self, rows: torch.Tensor) -> int:
        """Rows of a part."""
        return -(-len(rows) // self.parts(rows.shape[1]))

    def launch(
        self, kernel: Any, *args: Any, rows: torch.Tensor, chunk: int, **constants: Any
    ) -> None:
        """Run a kernel whose last arguments are the numbers of rows, of channels, and ``chunk``."""
        m, c = rows.shape
        kernel[self.parts(c), -(-c // self.channels)](
            *args, m, c, chunk,
            ROWS=self.rows, CHANNELS=self.channels, TIMES=self.times, **constants,
        )  # fmt: skip
