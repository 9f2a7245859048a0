"""NCCL presets: environment variables, set before the process group starts. Level 7."""

from __future__ import annotations

import os

from lockstep.config.schema import Nccl
from lockstep.launch.env import say


def apply(preset: Nccl) -> None:
    """Export the preset's variables; what the user exported already stays, and we say so."""
    for name, value in preset.env.items():
        before = os.environ.setdefault(name, str(value))
        if before != str(value):
            say(
                f"note: {name}={before} from your environment stays (nccl={preset.name} "
                f"would set {value})"
            )
