"""``python -m lockstep.drill CONF OVERRIDES...``: train.py with a worker that breaks. Level 8."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

from lockstep.config.bind import bind
from lockstep.drill import RUN
from lockstep.launch import launch


def main(conf: Path, overrides: list[str]) -> int:
    """Start a run whose processes follow the script of the environment; returns the exit code."""
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        config = bind(compose("config", overrides))
    return launch(config, RUN, worker="lockstep.drill.faults")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
