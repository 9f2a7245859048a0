"""Sums and counts of an evaluation, reduced once. Level 2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lockstep import dist


@dataclass(frozen=True)
class EvalResult:
    """Exact figures of one evaluation; ``top1`` and ``top5`` in percent."""

    top1: float
    top5: float
    loss: float
    count: int


class EvalSums:
    """Accumulates [loss, top-1, top-5, count] in float64 on the device: no sync until the end."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

    def add(self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> None:
        """Add one batch.

        Args:
            logits: [n, classes], any float dtype.
            targets: [n] int64.
            weights: [n] float32, 1 for a sample that counts and 0 for one that does not.
        """
        logits = logits.float()
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hit = (ranked == targets[:, None]).to(weights.dtype) * weights[:, None]
        loss = F.cross_entropy(logits, targets, reduction="none") * weights
        batch = torch.stack([loss.sum(), hit[:, 0].sum(), hit.sum(), weights.sum()])
        self._sums += batch.double()

    def reduce(self) -> EvalResult:
        """Sum over ranks. All ranks enter here."""
        loss, top1, top5, count = dist.all_reduce_sum_(self._sums).tolist()
        n = max(count, 1.0)
        return EvalResult(100 * top1 / n, 100 * top5 / n, loss / n, round(count))
