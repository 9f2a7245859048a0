"""The one exception that means "the user can fix this", and how a command tells it and ends.

Anything else that escapes is our bug and keeps its traceback. Level 0: every room may import it.
"""

from __future__ import annotations

import errno
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TextIO

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 85
"""Stopped on request with everything saved: run the same command again to go on."""
EXIT_UNREAD = 128 + 13
"""Whoever read the output has gone, as ``head`` does (SIGPIPE's, as a shell gives it)."""


class UserError(Exception):
    """A mistake in the configuration, the data or the environment.

    The message is printed as it stands, without a traceback, and the process exits with
    :data:`EXIT_USER_ERROR`. It names the key, the value and the fix.
    """


class Stopped(Exception):
    """The run was asked to stop, saved its state and can be resumed (:data:`EXIT_STOPPED`)."""


class NotBegun(BaseException):
    """The run was asked to stop before it trained.

    No Exception: libraries that are being imported would take it for the lack of another one.
    """


class Regroup(Stopped):
    """Saved everything in order to go on in a group of other size."""


def some(names: Iterable[str], most: int = 5) -> str:
    """The first few of names, and how many there are beside them."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def refuse_argument(error: Exception, section: str, name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise UserError where ``error`` says that ``name`` has no argument of this name."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if match and match[1] in kwargs:
        key, value = f"{section}.kwargs.{match[1]}", kwargs[match[1]]
        raise UserError(
            f"{key} = {value}: {name} has no such argument: leave it out, or, if it is of the group's "
            f"file, add '~{key}'"
        ) from error


def tell(text: str, stream: TextIO | None) -> None:
    """Print a line, if anybody reads it: a log that has ended must not end a training."""
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except OSError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """What was not written yet, and all that comes, goes nowhere."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def unwritten(error: OSError) -> int:
    """The exit code of a command whose output cannot be written; raises what is another error."""
    if error.errno == errno.EPIPE and _is_unread(sys.stdout):
        silence(sys.stdout)  # Python itself would write the rest in the end
        return EXIT_UNREAD
    if error.errno == errno.ENOSPC and error.filename is None:
        silence(sys.stdout)
        tell(f"error: the output cannot be written: {error.strerror}", sys.stderr)
        return EXIT_USER_ERROR
    raise error


def _is_unread(stream: TextIO) -> bool:
    """Whether it is a pipe at whose other end nobody is."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def exit_code(run: Callable[[], int], stopped: str = "stopped") -> int:
    """What ``run`` returns; the user's mistakes and Ctrl-C are told on stderr, without a traceback.

    Args:
        stopped: what Ctrl-C leaves, in one line.
    """
    for name in ("stdout", "stderr"):  # closed by the caller
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        code = run()
        sys.stdout.flush()
        return code
    except UserError as error:
        tell(f"error: {error}", sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        tell(stopped, sys.stderr)
        return EXIT_STOPPED
    except OSError as error:
        return unwritten(error)
