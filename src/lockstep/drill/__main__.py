"""``python -m lockstep.drill CONF OVERRIDES...``: train.py with a worker that breaks. Level 8."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

from lockstep.config.bind import bind
from lockstep.drill import RUN, listens, wait
from lockstep.drill.faults import Script
from lockstep.launch import launch


def main(conf: Path, overrides: list[str]) -> int:
    """Start a run whose processes follow the script of the environment; returns the exit code."""
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        config = bind(compose("config", overrides))
    port = Script.read(os.environ).wait_for_port
    if port is not None:
        wait(lambda: listens(port), config.launch.timeout_seconds)
    return launch(config, RUN, worker="lockstep.drill.faults")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
