"""``train.py`` whose jobs are ``stub_job.py``: the arguments are those of ``train.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import train
from lockstep.launch.sweep import Sweep

STUB = Path(__file__).with_name("stub_job.py")


class StubSweep(Sweep):
    def __init__(self, _script: str, *args: object) -> None:
        super().__init__(str(STUB), *args)  # type: ignore[arg-type]


def main(argv: list[str]) -> int:
    train.Sweep = StubSweep  # type: ignore[misc]
    return train.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
