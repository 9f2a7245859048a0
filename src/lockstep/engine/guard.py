"""What is done when a step goes wrong: stop, leave it out, or go back; and who is slow.

All figures judged here are reduced over ranks, so that every rank decides the same at the same
step.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median
from typing import Any

import numpy as np

from lockstep import dist
from lockstep.config.schema import Guard
from lockstep.data.source import Source
from lockstep.engine.step import SampleLosses
from lockstep.errors import UserError

SPIKE_WINDOW, SPIKE_LEAST = 50, 20
"""Steps whose losses a spike is measured by, and how many of them are needed."""
_NUM_NAMED = 4
PHASES = ("data", "forward")
"""What each rank does alone, unless the strategy lets ranks meet in forward passes."""
_STRAGGLER_STEPS = 50
_STRAGGLER_SHARE = 0.1
"""A rank is not called slow for less than this share of a step."""


class RollBack(Exception):
    """Go back to the last checkpoint and leave ``steps`` out when they come again."""

    def __init__(self, steps: list[int], reason: str) -> None:
        super().__init__(reason)
        self.steps = steps


class StepGuard:
    """Judges finished steps."""

    def __init__(self, cfg: Guard, source: Source, recent_losses: list[float]) -> None:
        """
        Args:
            source: names the samples.
            recent_losses: of the steps before; kept up to date in place, for the checkpoint.
        """
        self._cfg = cfg
        self._source = source
        self._recent = recent_losses
        self._skipped_in_a_row = 0

    def check(
        self, record: dict[str, Any], broken: str | None, losses: SampleLosses, *, left_out: bool
    ) -> str | None:
        """Judge a step. All ranks enter here with the same record.

        Args:
            record: step, loss, lr and the rest.
            broken: which figure is not finite, and of what value; None: all are.
            losses: this rank's part of the step.
            left_out: the step changed no weights on purpose.

        Returns:
            What the user should know, if anything.

        Raises:
            UserError: the run stops. RollBack: it goes back.
        """
        step = record["step"]
        if broken is None:
            self._skipped_in_a_row = 0
            if not left_out:
                self._check_spike(step, record["loss"])
            return None
        if left_out and self._cfg.nonfinite != "skip":
            return f"step {step}: {broken} again; its update is left out"
        why = f"step {step}: {broken} ({self._culprits(losses)})"
        if self._cfg.nonfinite == "rollback":
            raise RollBack([step], why)
        if self._cfg.nonfinite == "skip":
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row <= self._cfg.max_incidents:
                return f"{why}; its update is left out"
            why += f"; more than guard.max_incidents = {self._cfg.max_incidents} steps in a row"
        else:
            why += "; guard.nonfinite=skip goes on without such steps"
        raise UserError(
            f"{why}. Learning rate {record['lr']:g}; nothing was saved after it. Lower "
            "optimizer.lr, set optimizer.clip_grad_norm, or use precision=bf16 instead of fp16"
        )

    def _check_spike(self, step: int, loss: float) -> None:
        if self._cfg.spike is None:
            return
        if len(self._recent) >= SPIKE_LEAST:
            usual = median(self._recent)
            if loss > self._cfg.spike * usual > 0:
                # The update before may be the cause, this step's samples may be it, too.
                raise RollBack(
                    [step - 1, step],
                    f"step {step}: loss {loss:.4g} is {loss / usual:.1f} times the usual "
                    f"{usual:.4g} (guard.spike = {self._cfg.spike:g})",
                )
        self._recent.append(loss)
        del self._recent[:-SPIKE_WINDOW]

    def _culprits(self, losses: SampleLosses) -> str:
        """Ranks and samples whose own loss is not finite."""
        told = []
        for rank, (ids, total) in enumerate(dist.gather_objects(losses.not_finite())):
            if ids:
                names = ", ".join(f"{self._source.name(i)} (id {i})" for i in ids[:_NUM_NAMED])
                some = "" if len(ids) <= _NUM_NAMED else f"{len(ids)} of {total} samples, as "
                told.append(f"rank {rank}: {some}{names}")
        return "; ".join(told) or "each sample's loss is finite: the backward pass overflowed"


class StragglerWatch:
    """Finds the rank that takes longer than the others, from every rank's own seconds."""

    def __init__(self, factor: float | None, *, ranks_meet_in_forward: bool) -> None:
        """
        Args:
            ranks_meet_in_forward: the time there is that of whom a rank waits for.
        """
        self._factor = factor
        self._phases = PHASES[:1] if ranks_meet_in_forward else PHASES
        self._seconds: deque[np.ndarray] = deque(maxlen=_STRAGGLER_STEPS)
        self._step_seconds: deque[float] = deque(maxlen=_STRAGGLER_STEPS)
        self._told: set[tuple[int, str]] = set()

    def add(self, seconds: np.ndarray, step_seconds: float) -> str | None:
        """Take one step's figures; returns what the user should know, if anything.

        Args:
            seconds: [ranks, phases] of each rank.
            step_seconds: of the whole step.
        """
        if self._factor is None or len(seconds) < 2:
            return None
        self._seconds.append(seconds)
        self._step_seconds.append(step_seconds)
        if len(self._seconds) < _STRAGGLER_STEPS:
            return None
        means = np.mean(self._seconds, axis=0)
        step_mean = fmean(self._step_seconds)
        # Judge the next steps afresh: one message for one window.
        self._seconds.clear()
        for column, phase in enumerate(self._phases):
            rank = int(means[:, column].argmax())
            its, usual = means[rank, column], float(np.median(np.delete(means[:, column], rank)))
            much = its > self._factor * usual and its - usual > _STRAGGLER_SHARE * step_mean
            if much and (rank, phase) not in self._told:
                self._told.add((rank, phase))
                return (
                    f"rank {rank} is slow: {its:.3g} s a step in {phase}, the others' median is "
                    f"{usual:.3g} s; all ranks wait for it (guard.straggler = {self._factor:g})"
                )
        return None
