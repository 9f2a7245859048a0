"""Requests to stop. Level 7."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from lockstep.errors import NotBegun

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""What asks a run to save and stop: schedulers (SIGTERM, SIGUSR1) and Ctrl-C."""

REGROUP_SIGNAL = signal.SIGUSR2
"""By which an agent asks its workers to save and end, so that another node can join."""

Handler = Callable[[int, FrameType | None], Any]

_asked_before: list[str] = []
"""Requests before training. Modules of C that are being imported may make another error of what a
handler raises, which is then taken for the lack of a library."""


class StopFlag:
    """Remembers a request to stop until the training loop asks for it.

    The first reading of :attr:`requested` says that somebody listens. Before, there is nothing to
    save, and a signal does what it did before: wait for nobody (a loop that has not begun may be
    blocked in a rendezvous whose other side has already left). It raises NotBegun where such a
    signal was lost.
    """

    def __init__(self, *, last_chance: bool) -> None:
        """
        Args:
            last_chance: a second Ctrl-C ends the process at once. For a process that has a
                terminal of its own; a worker leaves that to the agent.
        """
        self._last_chance = last_chance
        self._name: str | None = None
        self.regroup = False
        """Whether the agent asked to make room for another node."""
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> str | None:
        """Name of the signal that asked to stop."""
        if not self._before:
            if _asked_before:
                raise NotBegun(_asked_before[-1])
            self._before = install(self._receive)
            self._before[REGROUP_SIGNAL] = signal.signal(REGROUP_SIGNAL, self._make_room)
        return self._name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        restore(self._before)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._name = self._name or signal.Signals(signum).name
        if self._last_chance and signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _make_room(self, _signum: int, _frame: FrameType | None) -> None:
        self.regroup = True


def install(handler: Handler | signal.Handlers) -> dict[int, Any]:
    """Handle the stop signals, except one that the parent shell ignores; returns what was."""
    before: dict[int, Any] = {s: signal.getsignal(s) for s in STOP_SIGNALS}
    for signum, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(signum, handler)
    return before


def restore(before: dict[int, Any]) -> None:
    """Undo :func:`install`."""
    for signum, old in before.items():
        signal.signal(signum, old)


@contextmanager
def handling(handler: Handler) -> Iterator[dict[int, Any]]:
    """Handle the stop signals for a while; gives what handled them before."""
    before = install(handler)
    try:
        yield before
    finally:
        restore(before)


@contextmanager
def refusing_to_start() -> Iterator[None]:
    """Handle the stop signals before training; within, one run begins."""
    _asked_before.clear()
    with handling(_refuse_to_start):
        yield


def _refuse_to_start(signum: int, _frame: FrameType | None) -> None:
    message = f"asked to stop ({signal.Signals(signum).name}) before training began"
    _asked_before.append(message)
    raise NotBegun(message)
