"""What started this process: nobody, torchrun (or a Kubernetes job), or srun. Level 7."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from lockstep.config.schema import Config
from lockstep.errors import UserError, tell


@dataclass(frozen=True)
class Joined:
    """A process group that somebody else has started, with this process in it."""

    rank: int
    world_size: int
    local_world_size: int
    address: str
    port: str
    one_gpu_each: bool
    """The launcher shows every process its own GPU alone."""

    def describe(self, config: Config) -> Config:
        """The configuration with ``launch`` as it is, for the plan.

        Raises:
            UserError: ``launch`` asks for something else.
        """
        asked = config.launch
        nodes, uneven = divmod(self.world_size, self.local_world_size)
        if uneven:
            raise UserError(
                f"WORLD_SIZE = {self.world_size}, but {self.local_world_size} processes on this "
                "node: start the same number of processes on every node"
            )
        fixed = asked.processes != "auto" and not asked.elastic
        if fixed and asked.processes * asked.max_nodes != self.world_size:
            raise UserError(
                f"launch.processes = {asked.processes} x launch.nodes = {asked.nodes}, but the "
                f"launcher started WORLD_SIZE = {self.world_size} processes: leave out launch.*"
            )
        here = {
            "processes": self.local_world_size,
            "nodes": nodes,
            "rendezvous": f"{self.address}:{self.port}",
        }
        return config.model_copy(update={"launch": asked.model_copy(update=here)})


def join(config: Config, environ: MutableMapping[str, str] = os.environ) -> Joined | None:
    """The process group that the environment describes, if any.

    srun's description is translated to torchrun's variables in ``environ``. With
    ``launch.rendezvous`` set, srun is taken to start one agent a node instead.

    Raises:
        UserError: the description is incomplete.
    """
    if "WORLD_SIZE" not in environ or "RANK" not in environ:
        tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
        in_step = "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ
        if not in_step or tasks == 1 or config.launch.rendezvous is not None:
            return None
        for name, value in _from_slurm(environ, tasks).items():
            environ.setdefault(name, value)
    environ.setdefault("LOCAL_RANK", "0")
    environ.setdefault("LOCAL_WORLD_SIZE", "1")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: start through torchrun "
            "or srun, or unset them to let lockstep start its own processes"
        )
    local = int(environ["LOCAL_WORLD_SIZE"])
    one_gpu_each = local > 1 and _sees_one_gpu(environ)
    if one_gpu_each:
        environ["LOCAL_RANK"] = "0"  # the index of the GPU among those this process sees
    return Joined(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_world_size=local,
        address=environ["MASTER_ADDR"],
        port=environ["MASTER_PORT"],
        one_gpu_each=one_gpu_each,
    )


def say(message: str) -> None:
    """Tell the user, once a node however many processes of it meet the same mistake."""
    if int(os.environ.get("SLURM_LOCALID") or os.environ.get("LOCAL_RANK") or 0) == 0:
        tell(message, sys.stderr)


def _sees_one_gpu(environ: Mapping[str, str]) -> bool:
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible != "" and "," not in visible and visible != "-1"


def _from_slurm(environ: Mapping[str, str], tasks: int) -> dict[str, str]:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "localhost"
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    counts = expand_counts(per_node) if per_node else [tasks]
    node = int(environ.get("SLURM_NODEID", 0))
    job, step = int(environ.get("SLURM_JOB_ID", 0)), int(environ["SLURM_STEP_ID"])
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(counts[node] if node < len(counts) else counts[-1]),
        "MASTER_ADDR": first_host(nodes),
        # All tasks must know it before they can talk, and two steps on a node must not share it.
        # Below 32768, where Linux takes its ephemeral ports from.
        "MASTER_PORT": str(10_000 + (31 * job + step) % 20_000),
    }


def first_host(nodelist: str) -> str:
    """First name of a Slurm list: ``node[08-10,3],other`` gives ``node08``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    assert match is not None, nodelist
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def expand_counts(counts: str) -> list[int]:
    """Slurm's tasks of each node: ``2(x3),1`` gives 2, 2, 2, 1."""
    out: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        out += [int(count)] * int(times or 1)
    return out
