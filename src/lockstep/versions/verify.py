"""Whether restored weights do what their card says. Level 8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.evaluation import Evaluation, evaluate_weights, read_weights


@dataclass(frozen=True)
class Verdict:
    """The card's figures beside those of an evaluation now."""

    card: dict[str, Any]
    now: Evaluation

    @property
    def difference(self) -> float:
        """Of top-1, in percentage points."""
        return abs(self.now.result.top1 - float(self.card["metrics"]["top1"]))


def verify(weights: Path, *, data: Path | None, device: str) -> Verdict:
    """Evaluate exported weights, whose checksum is the card's, as training did.

    Args:
        data: folder that holds ``val``; None: what they were trained on, below this folder.

    Raises:
        UserError: no weights, not those of the card, no images, or no figure to compare with.
    """
    read = read_weights(weights, "auto")
    if not isinstance(read.card["metrics"].get("top1"), float | int):
        raise UserError(f"{weights}: its card names no top-1; export a step that was evaluated")
    now = evaluate_weights(read, root=data, batch=None, device=device)
    if now.digest != read.card["data"].get("val"):
        raise UserError(
            "the weights were evaluated on other images than those of "
            f"{data or read.config.data.root} (digests differ): restore those, too (`python scripts/rollback.py to REV --all`), or "
            "name them with --data"
        )
    return Verdict(read.card, now)
