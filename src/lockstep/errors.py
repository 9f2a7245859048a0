"""The one exception that means "the user can fix this".

Anything else that escapes is our bug and keeps its traceback. Level 0: every room may import it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 85
"""Stopped on request with everything saved: run the same command again to go on."""


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


def exit_code(run: Callable[[], int], stopped: str = "stopped") -> int:
    """What ``run`` returns; the user's mistakes and Ctrl-C are told on stderr, without a traceback.

    Args:
        stopped: what Ctrl-C leaves, in one line.
    """
    try:
        return run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return EXIT_STOPPED
