"""A real Slurm of two nodes on this machine, with GPUs that are none, for tests."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.conftest import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
PATIENCE_SECONDS = 60

CONF = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# The second: how long a requeued job has to wait.
AuthInfo=socket={root}/munge.sock,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
GresTypes=gpu
NodeName=n[1-2] NodeHostname={host} Port=[{ports[1]}-{ports[2]}] CPUs=4 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=n[1-2] State=UP PriorityTier=2
"""


def missing() -> str | None:
    """Why there can be no cluster here."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install --no-install-recommends slurm-wlm munge"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


@contextmanager
def cluster(root: Path) -> Iterator[dict[str, str]]:
    """Its variables for commands; all daemons have ended when the context is left."""
    host = socket.gethostname()
    port = _three_ports()
    conf = CONF.format(root=root, host=host, ports=[port, port + 1, port + 2])
    (root / "slurm.conf").write_text(conf)
    (root / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/tty[0-1]\n")
    key = root / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    for name in ("state", "spool-n1", "spool-n2"):
        (root / name).mkdir()
    env = {"SLURM_CONF": str(root / "slurm.conf"), "PATH": _path()}
    munge = ["munged", "--foreground", "--force"]
    for option, name in {
        "socket": "munge.sock", "key-file": "munge.key", "log-file": "munge.log",
        "pid-file": "munge.pid", "seed-file": "munge.seed",
    }.items():  # fmt: skip
        munge.append(f"--{option}={root / name}")
    with ExitStack() as stack:

        def start(*command: str) -> None:
            out = stack.enter_context((root / "daemons.log").open("a"))
            daemon = subprocess.Popen(command, env=os.environ | env, stdout=out, stderr=out)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)

        start(*munge)
        _wait_for((root / "munge.sock").exists, "munge", root)
        start("slurmctld", "-D")
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node)
        states = ("sinfo", "-N", "-h", "-p", "all", "-o", "%T")
        _wait_for(lambda: slurm(env, *states).split() == ["idle", "idle"], "nodes", root)
        try:
            yield env
        finally:
            slurm(env, "scancel", "--full", "--signal=KILL", "--user=root")
            slurm(env, "scancel", "--user=root")
            _wait_for(lambda: not slurm(env, "squeue", "-h"), "end of the jobs", root)


def slurm(env: dict[str, str], *command: str) -> str:
    """What a command of Slurm's says."""
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout


def _wait_for(condition: Callable[[], bool], what: str, root: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        log = root / "daemons.log"
        assert time.monotonic() < deadline, f"no {what}: {log.read_text()[-3000:]}"
        time.sleep(0.2)


def _three_ports() -> int:
    """The first of three neighbouring free ports."""
    while True:
        port = free_port()
        try:
            for other in (port + 1, port + 2):
                with socket.socket() as s:
                    s.bind(("", other))
        except (OSError, OverflowError):
            continue
        return port


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"
