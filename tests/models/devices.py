"""Where tests of kernels run: their CPU forms everywhere, themselves on a GPU."""

from __future__ import annotations

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def distance(found: torch.Tensor, wanted: torch.Tensor, *, least: float = 1.0) -> float:
    """Between them, as a part of the second (but not of next to nothing, ``least``)."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=least))
