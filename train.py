"""The one door: ``python train.py [GROUP=OPTION ...] [KEY=VALUE ...]``; see ``--help``.

Compose (Hydra), bind to the typed configuration, launch. What is heavy is imported when it is
needed, so that help, ``--cfg`` and shell completion stay quick.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

try:
    if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing: no traceback
    import hydra
except ModuleNotFoundError as error:
    hint = "`make setup` and `. .venv/bin/activate`, or pip install -e ."
    print(f"error: {sys.executable} has no {error.name}: {hint}", file=sys.stderr)
    sys.exit(2)
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lockstep.config.bind import bind, run_name
from lockstep.config.cli import Command, disarm_hydra, explain, help_text, read_command, wants_help
from lockstep.errors import (
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    NotBegun,
    Stopped,
    UserError,
    unwritten,
)
from lockstep.launch import launch
from lockstep.launch.env import say
from lockstep.launch.signals import handling
from lockstep.launch.slurm import submit
from lockstep.launch.sweep import Sweep

CONF = Path(__file__).resolve().parent / "conf"


def main(argv: list[str]) -> int:
    """Run one command line; returns the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hydra's errors come to us instead of being printed with a traceback.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        if wants_help(argv):
            print(help_text(CONF), flush=True)
            return EXIT_OK
        return run(read_command(argv))
    except (KeyboardInterrupt, NotBegun):
        return EXIT_STOPPED
    except Exception as exc:
        message = explain(exc, CONF)
        if message is None and isinstance(exc, OSError):
            return unwritten(exc)
        if message is None:
            raise
        say(f"error: {message}")
        return EXIT_USER_ERROR


def run(command: Command) -> int:
    """Compose and run one job, or each job of a sweep; returns the exit code."""
    outcome: list[int | Exception] = []
    script = str(Path(__file__).resolve())
    sweep = Sweep(script, command)

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def compose(raw: DictConfig) -> float | None:
        context = HydraConfig.get()
        choices = context.runtime.choices
        try:
            if context.mode == RunMode.MULTIRUN:
                return sweep.run_here(raw, choices, context.overrides.task)
            config = bind(raw)
            name = run_name(config, choices, swept=[])
            if config.launch.scheduler == "slurm" and not config.plan:
                outcome.append(submit(config, name, [script, *command.flags, *command.overrides]))
            else:
                outcome.append(launch(config, name))
        except Exception as exc:  # noqa: BLE001 - Hydra would tell the user in its own words
            outcome.append(exc)
        return None

    disarm_hydra(sweep.begin)
    sys.argv[1:] = command.argv
    try:
        with handling(sweep.on_signal) if command.multirun else nullcontext():
            compose()
    except Stopped as exc:
        say(f"{exc}; the same command goes on")
    finally:
        sweep.report()
    for result in outcome:
        if isinstance(result, Exception):
            raise result
        return result
    if command.multirun and sweep.is_empty:
        raise UserError("command line: a key of the sweep has no values, so it has no jobs")
    return sweep.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
