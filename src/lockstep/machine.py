"""What a machine tells of itself, and where it keeps what can be made again. Level 0."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def nvidia_smi(*arguments: str) -> list[str] | None:
    """The lines that ``nvidia-smi`` prints; None: it is absent or fails. CUDA is not started."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_folder() -> Path:
    """For what takes long to make. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
