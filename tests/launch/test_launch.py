"""The launcher with real processes and a worker that only pretends to train."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from tests.conftest import (
    PATIENCE_SECONDS,
    REPOSITORY,
    clean_environment,
    free_port,
    opened,
    wait_until,
)

DOOR = Path(__file__).with_name("door.py")


def launched(
    root: Path, *overrides: str, prefix: tuple[str, ...] = (sys.executable,), **env: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    """The stub's command, running."""
    return opened(*prefix, DOOR, root, *overrides, **env)


def run(root: Path, *overrides: str, **options: object) -> tuple[int, str, str]:
    """The stub's command to its end: exit code, stdout, stderr."""
    with launched(root, *overrides, **options) as process:  # type: ignore[arg-type]
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode, out, err


def wait_for_training(run_dir: Path, ranks: int) -> list[int]:
    """Process ids of the workers, once all of them train."""
    wait_until(lambda: len(list(run_dir.glob("training-*"))) == ranks, "training")
    return [int((run_dir / f"pid-{rank}").read_text()) for rank in range(ranks)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("processes", [1, 2], ids=["here", "agent"])
@pytest.mark.parametrize(
    ("action", "code", "said"),
    [
        ("nothing", 0, ""),
        ("mistake", 2, "error: batch.global = 7: a mistake of the user"),
        ("stop", 85, "stopped after step 3; everything is saved"),
        ("crash", 1, "RuntimeError: a bug of ours"),
    ],
    ids=["done", "mistake", "stopped", "crash"],
)
def test_exit_code_and_one_message(
    tmp_path: Path, processes: int, action: str, code: int, said: str
) -> None:
    got, out, err = run(tmp_path, f"launch.processes={processes}", STUB=action)
    assert got == code, err
    assert out == "rank 0 speaks\n"
    assert err.count(said) == 1 or not said
    assert err.count("Traceback") == (1 if action == "crash" else 0)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("crash", "rank 1 failed:\nTraceback"),
        ("die", "rank 1 was killed by SIGKILL"),
        ("leave", "rank 1 ended with exit code 7"),
    ],
)
def test_the_rank_that_failed_is_told_not_its_peers(tmp_path: Path, action: str, said: str) -> None:
    code, _, err = run(tmp_path, "launch.processes=2", STUB=f"1:{action}")
    assert code == 1
    assert said in err
    assert "rank-1.log" in err
    assert "rank 0" not in err
    assert (tmp_path / "stub/logs/rank-1.log").read_text().startswith("rank 1 speaks\n")


def test_restart_after_a_crash_but_not_after_a_mistake(tmp_path: Path) -> None:
    two = ("launch.processes=2", "launch.max_restarts=1")
    code, _, err = run(tmp_path / "a", *two, STUB="crash-once")
    assert (code, err.count("starting again")) == (0, 1), err
    code, _, err = run(tmp_path / "b", *two, STUB="mistake")
    assert (code, err.count("starting again"), err.count("a mistake")) == (2, 0, 1), err


@pytest.mark.parametrize(
    ("processes", "name"), [(1, "SIGTERM"), (1, "SIGUSR1"), (1, "SIGINT"), (2, "SIGTERM")]
)
def test_a_signal_saves_and_leaves_no_orphan(tmp_path: Path, processes: int, name: str) -> None:
    with launched(tmp_path, f"launch.processes={processes}", STUB="train") as process:
        pids = wait_for_training(tmp_path / "stub", processes)
        process.send_signal(signal.Signals[name])
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 85, err
    assert err.count("stopped after step 5") == 1
    assert "nothing was saved yet: the same command starts anew" in err and "goes on" not in err
    asked = [(tmp_path / f"stub/asked-{rank}").read_text() for rank in range(processes)]
    assert asked == [name] * processes
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["grace is over", "second Ctrl-C"])
def test_workers_that_do_not_stop_are_killed(tmp_path: Path, how: str) -> None:
    grace = 0.5 if how == "grace is over" else 600
    two = ("launch.processes=2", f"launch.grace_seconds={grace}")
    with launched(tmp_path, *two, STUB="deaf") as process:
        pids = wait_for_training(tmp_path / "stub", 2)
        process.send_signal(signal.SIGINT)
        if how == "second Ctrl-C":
            assert process.stderr is not None
            assert "SIGINT" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "without saving" in err
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_killed_agent_leaves_no_worker_and_no_lock(tmp_path: Path) -> None:
    with launched(tmp_path, "launch.processes=2", STUB="deaf") as process:
        pids = wait_for_training(tmp_path / "stub", 2)
        process.kill()
        process.wait()
        wait_until(lambda: not any(alive(pid) for pid in pids), "the workers' end")
    assert run(tmp_path, STUB="nothing")[0] == 0


def test_the_folder_belongs_to_one_run(tmp_path: Path) -> None:
    with launched(tmp_path, STUB="train") as process:
        wait_for_training(tmp_path / "stub", 1)
        code, _, err = run(tmp_path, STUB="nothing")
        assert code == 2
        assert f"in use by process {process.pid} on " in err


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    assert run(tmp_path, STUB="nothing")[0] == 0
    code, out, err = run(tmp_path, STUB="crash")
    assert (code, out) == (0, "")
    assert "already finished: top-1 12.50 %" in err and "trained on" not in err
    code, _, err = run(tmp_path, "data.root=elsewhere", STUB="crash")
    assert code == 0 and "data.root = elsewhere: the images of " in err
    code, _, err = run(tmp_path, "epochs=3", STUB="crash")
    assert code == 2 and "epochs" in err


def test_resume_never_starts_in_an_empty_folder_alone(tmp_path: Path) -> None:
    assert run(tmp_path, "resume=never", STUB="stop")[0] == 85
    code, _, err = run(tmp_path, "resume=never", STUB="nothing")
    assert code == 2 and "holds a run" in err


def test_plan_starts_nothing(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path / "runs", "plan=true", STUB="crash")
    assert code == 0 and "global batch" in out
    assert not (tmp_path / "runs").exists()


def test_joins_torchrun(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    code, out, err = run(tmp_path, prefix=torchrun, STUB="meet")
    assert code == 0, err
    assert out == "rank 0 speaks\n"
    assert '"world_size": 2' in (tmp_path / "stub/DONE").read_text()


@pytest.mark.parametrize(
    ("action", "codes", "said"),
    [
        ("meet", {0}, ""),
        ("mistake", {2}, "error: batch.global = 7: a mistake of the user"),
        ("stop", {85}, "stopped after step 3"),
        ("1:crash", {1}, "rank 1 failed:\nTraceback"),
    ],
)
def test_joins_srun(tmp_path: Path, action: str, codes: set[int], said: str) -> None:
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()),
        "STUB": action,
    }

    def task(rank: int) -> subprocess.Popen[str]:
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        return subprocess.Popen(
            [sys.executable, str(DOOR), str(tmp_path)],
            cwd=REPOSITORY,
            env=clean_environment(**step, **place),
            stderr=subprocess.PIPE,
            text=True,
        )

    tasks = [task(0), task(1)]
    errors = [t.communicate(timeout=PATIENCE_SECONDS)[1] for t in tasks]
    assert {t.returncode for t in tasks} == codes, errors
    assert "".join(errors).count(said) == 1 or not said
    assert "".join(errors).count("Traceback") == (1 if action == "1:crash" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "action",
    ["meet", "train", "late-crash"],
    ids=["done", "stopped on one node", "one fails after the other is done"],
)
def test_two_nodes(tmp_path: Path, action: str) -> None:
    nodes = ("launch.nodes=2", f"launch.rendezvous=localhost:{free_port()}", "launch.processes=1")
    with (
        launched(tmp_path, *nodes, STUB=action) as one,
        launched(tmp_path, *nodes, STUB=action) as two,
    ):
        if action == "train":
            wait_for_training(tmp_path / "stub", 2)
            # Ranks agree on stopping in a real run; here both nodes are asked.
            one.send_signal(signal.SIGTERM)
            two.send_signal(signal.SIGTERM)
        errors = [node.communicate(timeout=PATIENCE_SECONDS)[1] for node in (one, two)]
    codes = {"meet": [0, 0], "train": [85, 85], "late-crash": [0, 1]}[action]
    assert sorted([one.returncode, two.returncode]) == codes, errors
    if action == "meet":
        assert '"world_size": 2' in (tmp_path / "stub/DONE").read_text()


@pytest.mark.slow
def test_asked_to_stop_while_the_group_forms_anew(tmp_path: Path) -> None:
    port = free_port()
    nodes = ("launch.nodes=1:2", f"launch.rendezvous=localhost:{port}", "launch.processes=1")
    waiting = "launch.gather_seconds=60"

    def answers() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("localhost", port)) == 0

    with launched(tmp_path, *nodes, waiting, STUB="train") as one:
        wait_until(answers, "the rendezvous, which shall be there")
        with launched(tmp_path, *nodes, waiting, STUB="train"):
            workers = wait_for_training(tmp_path / "stub", 2)
        for worker in workers:
            with suppress(ProcessLookupError):  # the other node's has ended with it
                os.kill(worker, signal.SIGKILL)
        assert one.stderr is not None
        assert any("starting again" in line for line in one.stderr)
        time.sleep(1)
        one.send_signal(signal.SIGTERM)
        error = one.communicate(timeout=PATIENCE_SECONDS)[1]
    assert one.returncode == 85, error
    assert "Traceback" not in error and "SIGTERM" in error
    assert not any(alive(worker) for worker in workers)


@pytest.mark.slow
def test_nodes_that_do_not_meet(tmp_path: Path) -> None:
    alone = ("launch.nodes=2", f"launch.rendezvous=localhost:{free_port()}")
    code, _, err = run(tmp_path, *alone, "launch.timeout_seconds=2", STUB="nothing")
    assert code == 2 and "launch.rendezvous = localhost:" in err
    assert not (tmp_path / "stub/DONE").exists()
