"""A sweep: one process after another, each a run of its own. Level 7."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from omegaconf import DictConfig

from lockstep.config.bind import bind, run_name
from lockstep.config.cli import Command
from lockstep.errors import EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from lockstep.launch.env import say
from lockstep.parent import die_with_parent


@dataclass
class Sweep:
    """Runs the jobs that Hydra composes, each as ``train.py`` in a fresh process.

    A job that fails does not keep the others from running; a request to stop does.
    """

    script: str
    command: Command
    jobs: list[tuple[Path, int]] = field(default_factory=list)
    """Run folder and exit code of each job so far."""
    stopped: bool = False
    _child: subprocess.Popen[bytes] | None = None

    def run_job(
        self, raw: DictConfig, choices: Mapping[str, str], overrides: Sequence[str]
    ) -> None:
        """Run the composed job to its end.

        Raises:
            UserError: the sweep is itself one of several processes.
        """
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise UserError("a sweep starts its own processes: run it without torchrun")
        if self.stopped:
            return
        swept = self.command.swept(overrides)
        say(f"\njob {len(self.jobs)}: {' '.join(swept or overrides)}")
        try:
            config = bind(raw)
            run_dir = Path(config.run.root) / run_name(config, choices, swept)
        except UserError as exc:
            say(f"error: {exc}")
            self.jobs.append((Path(" ".join(swept)), EXIT_USER_ERROR))
            return
        argv = [sys.executable, self.script, *self.command.flags]
        argv += [o for o in overrides if o.partition("=")[0] != "run.name"]
        argv += [f"run.name='{run_dir.name}'", "hydra.mode=RUN"]
        self._child = subprocess.Popen(
            argv,
            # A session of its own: a terminal's Ctrl-C reaches it through us, and only once.
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads here
        )
        code = self._child.wait()
        # As a shell would say it: a signal's number above 128.
        self.jobs.append((run_dir, code if code >= 0 else 128 - code))

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Ask the running job to save and stop, and start no other."""
        self.stopped = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.Signals(signum))

    @property
    def exit_code(self) -> int:
        """The first that is not zero."""
        code = next((code for _, code in self.jobs if code != EXIT_OK), EXIT_OK)
        return code or (EXIT_STOPPED if self.stopped else EXIT_OK)

    def table(self) -> str:
        """One line a job: exit code, top-1, run folder."""
        rows = [f"{'exit':>4}  {'top-1':>7}  run folder"]
        rows += [f"{code:>4}  {_top1(run_dir):>7}  {run_dir}" for run_dir, code in self.jobs]
        return "\n".join(rows)


def _top1(run_dir: Path) -> str:
    try:
        return f"{json.loads((run_dir / 'DONE').read_text())['top1']:.2f} %"
    except (OSError, ValueError, KeyError, TypeError):
        return "-"
