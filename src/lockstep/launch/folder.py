"""The run folder before training: who may write, what is there already. Level 7."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.checkpoint.manifest import (
    Damaged,
    check_law,
    cut_off,
    is_committed,
    read_manifest,
    step_folders,
)
from lockstep.config.bind import law, load_config, save_config
from lockstep.config.plan import Plan
from lockstep.config.schema import Config
from lockstep.durable import atomic_write
from lockstep.errors import UserError

LOCK, DONE, LOGS = "lock", "DONE", "logs"


@contextmanager
def claim(run_dir: Path, config: Config, plan: Plan) -> Iterator[None]:
    """Own the folder for the time of a run, and write down what the run is.

    Raises:
        UserError: in use, holds another run, or is not to be gone on with.
    """
    with run_lock(run_dir):
        counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # by an agent, by requeueing
        restarted = any(os.environ.get(count, "0") != "0" for count in counts)
        if config.resume == "never" and not restarted:
            _check_empty(run_dir)
        _check_same_run(run_dir, config)
        with writing(run_dir / "config.yaml", run_dir.parent):
            save_config(config, run_dir / "config.yaml")
        with writing(run_dir / "plan.json", run_dir.parent):
            atomic_write(run_dir / "plan.json", json.dumps(plan.to_json(), indent=2).encode())
        yield


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold ``run_dir/lock``. The kernel releases it, however the holder ends.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    path = run_dir / LOCK
    with writing(path, run_dir.parent):
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            file.seek(0)
            raise UserError(
                f"run folder {run_dir} is in use by {file.read().strip() or 'another process'}: "
                "wait for it, stop it, or choose another run.name"
            ) from exc
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
        with writing(path, run_dir.parent):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), holder.encode())
        yield


@contextmanager
def writing(path: Path, root: Path) -> Iterator[None]:
    """Write ``path`` below ``run.root``. Raises UserError where that is refused."""
    try:
        yield
    except OSError as exc:
        raise UserError(
            f"run.root = {root}: cannot write {path}: {exc.strerror}; make room, or choose another run.root"
        ) from exc


def finished(run_dir: Path, config: Config) -> dict[str, Any] | None:
    """Summary of a run that is already done.

    Raises:
        UserError: the finished run has another configuration.
    """
    try:
        summary = json.loads((run_dir / DONE).read_text())
    except (OSError, ValueError):
        return None
    _check_same_run(run_dir, config)
    return dict(summary)


def again(run_dir: Path, config: Config) -> str:
    """What the same command would do now, where a run has ended before its time."""
    checkpoints = run_dir / "checkpoints"
    steps = [step for step, folder in step_folders(checkpoints) if is_committed(folder)]
    steps += [read_manifest(path).step for path, _ in cut_off(checkpoints)]
    in_the_way = {
        "resume=never": config.resume == "never" and (run_dir / "config.yaml").exists(),
        "stop_at": config.stop_at is not None and max(steps, default=0) >= config.stop_at,
    }
    without = " and ".join(word for word, is_so in in_the_way.items() if is_so)
    command = "the same command" + (f" without {without}" if without else "")
    if steps:
        return f"{command} goes on from {run_dir}"
    begins = "anew" if config.resume in ("auto", "never") else f"from {config.resume} again"
    return f"nothing was saved yet: {command} starts {begins}"


def trained_on(run_dir: Path) -> str | None:
    """Where the images of a run were, if that is known."""
    with suppress(UserError):
        return load_config(run_dir / "config.yaml").data.root
    return None


def digests(run_dir: Path) -> dict[str, str]:
    """Of the images of each split, as the newest checkpoint has them; empty: unknown."""
    found = _recorded(run_dir, "data")
    return {split: found[split] for split in ("train", "val") if split in found}


def _recorded(run_dir: Path, key: str) -> dict[str, Any]:
    """What the newest checkpoint that can be read says of it; empty: none does."""
    for _, folder in step_folders(run_dir / "checkpoints"):
        with suppress(Damaged):
            if isinstance(found := read_manifest(folder).meta.get(key), dict):
                return found
    return {}


def _check_empty(run_dir: Path) -> None:
    found = sorted(p.name for p in run_dir.iterdir() if p.name not in (LOCK, LOGS))
    if found:
        raise UserError(
            f"resume = never, but {run_dir} holds a run ({', '.join(found[:5])}): choose another "
            "run.name, remove the folder, or leave out resume=never to go on"
        )


def _check_same_run(run_dir: Path, config: Config) -> None:
    """Something worth keeping must not get a ``config.yaml`` that did not make it."""
    checkpoints = run_dir / "checkpoints"
    holds_results = checkpoints.is_dir() and any(checkpoints.iterdir())
    if not holds_results and not (run_dir / DONE).exists():
        return
    # What made a checkpoint is in its manifest; config.yaml may be damaged, or of another version.
    saved = _recorded(run_dir, "law")
    if not saved:
        try:
            saved = law(load_config(run_dir / "config.yaml"))
        except UserError:
            return
    check_law(saved, law(config))
