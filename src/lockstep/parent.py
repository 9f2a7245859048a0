"""The promise that no process outlives the one that started it. Level 0."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
UNWANTED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What is meant for a rank reaches its whole group or job; its helpers end when it does."""


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the process ``parent``, which started it, ends.

    However the parent ends: a killed agent must not leave workers that hold the GPUs.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)
