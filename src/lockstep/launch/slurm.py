"""A run handed to Slurm: the batch script, and its submission. Level 7.

One task a node, and each is our own agent with its node's processes, which meet at the first node:
what ``torchrun`` under ``srun`` would be, with our way of stopping and of starting again.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.config.schema import Config
from lockstep.errors import EXIT_OK, EXIT_STOPPED, UserError
from lockstep.launch.env import say
from lockstep.launch.folder import LOGS, finished, writing

SCRIPT = "slurm.sh"

_REQUEUE = f"""\
# Stopped on request and saved: back to the queue, to go on from there. A cancelled job is not.
if [ $code -eq {EXIT_STOPPED} ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60  # until Slurm ends this script
fi
"""


def submit(config: Config, name: str, argv: Sequence[str]) -> int:
    """Hand the run to ``sbatch``, or print the script if it is only to be looked at.

    Args:
        name: folder of the run below ``run.root``.
        argv: ``train.py`` and its arguments, which the nodes repeat.

    Raises:
        UserError: there is no Slurm here, or it refuses.
    """
    script = render(config, name, argv)
    if config.launch.dry_run:
        print(script, end="")
        return EXIT_OK
    run_dir = Path(config.run.root) / name
    if config.resume != "never" and finished(run_dir, config) is not None:
        say(f"already finished: {run_dir}\nto train again: resume=never run.name=NEW_NAME")
        return EXIT_OK
    path = run_dir / LOGS / SCRIPT
    with writing(path, Path(config.run.root)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=True
        )
    except FileNotFoundError as exc:
        raise UserError(
            "launch.scheduler = slurm, but there is no sbatch here: run this on a login node; "
            "launch.dry_run=true prints the script"
        ) from exc
    except subprocess.CalledProcessError as exc:
        reason = " ".join(exc.stderr.split())
        raise UserError(f"launch.slurm: {reason} (the script is {path})") from exc
    job = done.stdout.strip().partition(";")[0]
    say(
        f"submitted job {job}: {run_dir}\n"
        f"  state   squeue --job {job}\n"
        f"  output  {path.parent}/slurm-{job}.log\n"
        f"  stop    scancel {job}; scancel --signal=USR1 {job} saves and puts it back into the queue"
    )
    return EXIT_OK


def render(config: Config, name: str, argv: Sequence[str]) -> str:
    """The batch script."""
    launch = config.launch
    nodes = str(launch.nodes).replace(":", "-")
    logs = (Path(config.run.root) / name / LOGS).resolve()
    options = {
        "job-name": name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "output": f"{logs}/slurm-%j.log",
    }
    options |= {key.replace("_", "-"): value for key, value in launch.slurm.items()}
    lines = ["#!/bin/bash"]
    lines += [
        f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={value}"
        for key, value in options.items()
        if value is not False
    ]
    replaced = ("run.name=", "launch.scheduler=", "launch.dry_run=", "launch.rendezvous=")
    words = [word for word in argv if not word.lstrip("+~").startswith(replaced)]
    ours = [f'run.name="{name}"', "launch.scheduler=local", "launch.dry_run=false"]
    command = shlex.join([sys.executable, *words, *ours])
    lines += ["", f"cd {shlex.quote(str(Path.cwd()))} || exit 1"]
    if launch.max_nodes > 1:
        lines += [
            "# The agents meet at this node, which is the first of them.",
            # Below 32768, where Linux takes its ephemeral ports from.
            "meet=$(hostname):$((10000 + SLURM_JOB_ID % 20000))",
        ]
        command += ' launch.rendezvous="$meet"'
    lines += [
        "# On each node one agent, which starts the processes.",
        f"srun --kill-on-bad-exit=0 {command}",
        "code=$?",
    ]
    requeues = launch.slurm.get("requeue") is True and config.stop_at is None
    return "\n".join(lines) + "\n" + (_REQUEUE if requeues else "") + "exit $code\n"
