"""A worker that does what ``STUB`` says instead of training, for tests of the launcher.

``STUB`` is ``[RANK:]ACTION``: an action of all ranks, or of one while the others wait for it in a
collective. Only the latter, and ``meet``, need a process group, and the seconds of importing torch.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from lockstep.config.plan import Plan
from lockstep.config.schema import Config
from lockstep.errors import Stopped, UserError


def run(config: Config, plan: Plan, run_dir: Path, stop: Any) -> dict[str, Any]:
    rank = int(os.environ.get("RANK", "0"))
    one, _, action = os.environ["STUB"].rpartition(":")
    print(f"rank {rank} speaks", flush=True)
    (run_dir / f"pid-{rank}").write_text(str(os.getpid()))
    if action in ("mistake", "crash") and not one:  # whoever fails first ends the others
        while not (run_dir / "pid-0").exists():
            time.sleep(0.01)
    world_size = 1
    if one or action == "meet":
        from lockstep import dist

        dist.init("cpu", 60, group_of_one=False)
        world_size = dist.world_size()
        # A rank whose group stands may be gone before its peers have met it.
        dist.barrier()
    if not one or int(one) == rank:
        _act(action, rank, run_dir, stop)
    if one:
        dist.barrier()
    summary = {"top1": 12.5, "world_size": world_size}
    if rank == 0:
        (run_dir / "DONE").write_text(json.dumps(summary))
    return summary


def _act(action: str, rank: int, run_dir: Path, stop: Any) -> None:
    if action == "mistake":
        raise UserError("batch.global = 7: a mistake of the user")
    if action == "crash":
        raise RuntimeError("a bug of ours")
    if action == "stop":
        raise Stopped("stopped after step 3; everything is saved")
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "leave":
        os._exit(7)
    if action == "crash-once" and not (run_dir / f"crashed-{rank}").exists():
        (run_dir / f"crashed-{rank}").touch()
        raise RuntimeError("a bug that goes away")
    if action == "late-crash" and rank == 1:
        deadline = time.monotonic() + 60
        while not (run_dir / "DONE").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)  # the other agent is waiting by now
        raise RuntimeError("a bug of ours")
    if action in ("train", "deaf"):
        _train(rank, run_dir, stop, deaf=action == "deaf")


def _train(rank: int, run_dir: Path, stop: Any, *, deaf: bool) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        asked = stop.requested
        (run_dir / f"training-{rank}").touch()
        if asked and not deaf:
            (run_dir / f"asked-{rank}").write_text(asked)
            raise Stopped("stopped after step 5; everything is saved")
        time.sleep(0.05)
    raise AssertionError("nobody asked")
