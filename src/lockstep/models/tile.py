"""What kernels of our own have in common: when they run, how they divide a batch. Level 2."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

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

    def launch(self, kernel: Any, *args: Any, rows: torch.Tensor, **constants: Any) -> None:
        """Run a kernel whose last arguments are the numbers of rows, of channels, and of a part's rows.

        Args:
            rows: [rows, channels].
        """
        m, c = rows.shape
        kernel[self.parts(c), -(-c // self.channels)](
            *args, m, c, self._chunk(rows),
            ROWS=self.rows, CHANNELS=self.channels, TIMES=self.times, **constants,
        )  # fmt: skip

    def sums_like(self, rows: torch.Tensor, *numbers: int) -> torch.Tensor:
        """Room for the sums of [rows, channels]: [parts, numbers, channels] float32."""
        c = rows.shape[1]
        return rows.new_empty((self.parts(c), *numbers, c), dtype=torch.float32)

    def sum_parts(self, values: torch.Tensor) -> torch.Tensor:
        """What kernels stand for: sums of [rows, ..., channels], of each part, as :meth:`sums_like`."""
        sums = torch.zeros(self.parts(values.shape[-1]), *values.shape[1:])
        for i, part in enumerate(values.float().split(self._chunk(values))):
            sums[i] = part.sum(0)
        return sums

    def _chunk(self, rows: torch.Tensor) -> int:
        return max(1, -(-len(rows) // self.parts(rows.shape[-1])))


def trains_in_16_bits(layer: nn.Module, x: torch.Tensor) -> bool:
    """On a GPU, with autocast (which is to 16 bits, everywhere)."""
    return layer.training and x.is_cuda and torch.is_autocast_enabled("cuda")


def has_hooks(layer: nn.Module) -> bool:
    """Whether somebody would miss that a layer is called by itself."""
    forward = layer._forward_hooks or layer._forward_pre_hooks
    return bool(forward or layer._backward_hooks or layer._backward_pre_hooks)


def as_type(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x itself where it has the type: torch 2.11's compiler takes a function's result that is another
    of its values for two, and loses the gradient of one."""
    return x if x.dtype == dtype else x.to(dtype)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """[n, c, h, w] as contiguous [n h w, c]; no copy where channels lie last."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).contiguous()


def wide(of_channels: torch.Tensor) -> torch.Tensor:
    """[c] as [1, c, 1, 1]."""
    return of_channels.view(1, -1, 1, 1)
