"""Runs and sweeps on a real Slurm of two nodes, and the script alone where there is none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.config.bind import save_config
from lockstep.errors import UserError
from lockstep.launch.slurm import render
from lockstep.telemetry.compare import compare_runs
from tests.conftest import REPOSITORY, clean_environment
from tests.launch.slurm_cluster import cluster, missing, slurm
from tests.launch.test_sweep import column, no_step_twice, sweeping
from tests.runs import configure, plan_of, records, train_one_rank

PATIENCE_SECONDS = 120
ARGV = ("train.py", "launch=slurm", "model.kwargs={depth: 1}", "run.name=other")

Cluster = dict[str, str]


def script(*overrides: str) -> str:
    config = configure("launch=slurm", "run.root=/runs", *overrides)
    return render(config, "run-1", ARGV)


def test_the_script_in_bash() -> None:
    text = script("launch.nodes=2", "++launch.slurm={gpus_per_node: 8, exclusive: true}")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    lines = text.splitlines()
    for option in ("nodes=2", "gpus-per-node=8", "exclusive", "signal=USR1@120", "requeue"):
        assert f"#SBATCH --{option}" in lines
    assert "#SBATCH --output=/runs/run-1/logs/slurm-%j.log" in lines
    (srun,) = (line for line in lines if line.startswith("srun "))
    assert "'model.kwargs={depth: 1}' 'run.name=\"run-1\"' launch.scheduler=local" in srun
    assert srun.endswith(' launch.rendezvous="$meet"') and "other" not in srun


@pytest.mark.parametrize(
    "overrides, requeues, nodes",
    [
        ((), True, "1"),
        (("launch.nodes=1:4",), True, "1-4"),
        (("stop_at=5",), False, "1"),
        (("launch.slurm.requeue=false",), False, "1"),
    ],
    ids=["one node", "elastic", "stops on purpose", "not wanted"],
)
def test_what_the_script_depends_on(overrides: tuple[str, ...], requeues: bool, nodes: str) -> None:
    text = script(*overrides)
    assert ("scontrol requeue" in text) is requeues
    assert f"#SBATCH --nodes={nodes}\n" in text
    assert ("launch.rendezvous=" in text) is (nodes != "1")


@pytest.mark.parametrize(
    "option",
    ["wrap: rm", "output: /etc/passwd", 'time: "1\\n#SBATCH --wrap=rm"', 'qos: "a b"'],
    ids=["a command", "a path", "a line", "a space"],
)
def test_what_a_script_never_says(option: str) -> None:
    with pytest.raises(UserError, match=r"launch\.slurm"):
        script(f"++launch.slurm={{{option}}}")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster's variables."""
    if reason := missing():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm")) as env:
        yield env


def start(env: Cluster, *words: str, **more: str) -> str:
    """Submit a run; returns the job's number."""
    done = subprocess.run(
        [sys.executable, "train.py", *words, "device=cpu"],
        cwd=REPOSITORY, env=clean_environment(**env, **more), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(r"submitted job (\d+)", done.stderr)
    assert found is not None, done.stderr
    return found[1]


def state(env: Cluster, job: str) -> dict[str, str]:
    """What Slurm knows of a job."""
    words = slurm(env, "scontrol", "show", "job", job).split()
    return dict(word.partition("=")[::2] for word in words)


def wait_until(condition: Callable[[], object], told: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.1)


def wait_for_end(env: Cluster, job: str, run_dir: Path) -> dict[str, str]:
    ended = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    wait_until(
        lambda: state(env, job)["JobState"] in ended,
        lambda: f"{state(env, job)}\n{output(run_dir)}",
    )
    return state(env, job)


def output(run_dir: Path) -> str:
    return "".join(path.read_text() for path in run_dir.glob("logs/*.log"))


def trained(run_dir: Path, steps: int) -> Callable[[], bool]:
    """Whether so many steps are done."""
    return lambda: (run_dir / "metrics.jsonl").exists() and len(records(run_dir, "step")) >= steps


def small(data: Path, root: Path) -> tuple[str, ...]:
    return (
        f"data.root={data}", f"run.root={root}", "batch.global=8", "steps=150", "optimizer.lr=1e-4",
        "++model.kwargs={depth: 1, embed_dim: 24, num_heads: 3}", "data.workers=1",
        "data.num_classes=null", "evaluate.every_epochs=99", "checkpoint.every_epochs=99",
    )  # fmt: skip


URGENT = "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"


@pytest.mark.slow
def test_two_nodes_are_preempted_requeued_and_finish_the_same_run(
    nodes: Cluster, few_digits: Path, tmp_path: Path
) -> None:
    words = small(few_digits, tmp_path)
    config = configure(*words, "device=cpu", "run.name=alone")
    train_one_rank(config, plan_of(config), tmp_path / "alone")
    save_config(config, tmp_path / "alone/config.yaml")

    run_dir = tmp_path / "run"
    job = start(
        nodes, *words, "run.name=run", "launch=slurm", "launch.nodes=2", "launch.processes=1",
        "launch.slurm.gpus_per_node=2", "launch.slurm.partition=all",
    )  # fmt: skip
    wait_until(trained(run_dir, 5), lambda: output(run_dir))
    slurm(nodes, "sbatch", *URGENT)
    wait_until(lambda: state(nodes, job)["Restarts"] != "0", lambda: output(run_dir))
    assert not (run_dir / "DONE").exists()
    ended = wait_for_end(nodes, job, run_dir)
    assert ended["JobState"] == "COMPLETED", output(run_dir)
    assert json.loads((run_dir / "plan.json").read_text())["world_size"] == 2
    assert "gpu:2" in ended["TresPerNode"]
    assert "goes on from" in output(run_dir)
    found = compare_runs(tmp_path / "alone", run_dir, tolerance=1e-2)
    assert found.parting is None and found.num_steps == 150, found.text()


@pytest.mark.slow
def test_a_sweep_by_submitit_is_preempted_and_requeued(nodes: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = (
        "seed=1,2", "hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=1",
        "hydra.launcher.partition=all",
    )  # fmt: skip
    with sweeping(tmp_path, *words, STUB="wait:1", **nodes) as process:

        def told() -> str:
            logs = (tmp_path / ".sweep/.submitit").glob("**/*_0_log.*")
            return slurm(nodes, "squeue") + "".join(path.read_text() for path in logs)

        wait_until(lambda: list(tmp_path.glob("*seed.1/waiting")), told)
        (waiting,) = tmp_path.glob("*seed.1/waiting")
        waiting.unlink()
        (job,) = (j for j in slurm(nodes, "squeue", "-h", "-o", "%i").split() if j.endswith("_0"))
        slurm(nodes, "scancel", "--signal=USR1", job)
        wait_until(waiting.exists, told)
        (tmp_path / "go").touch()
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    assert column(tmp_path, "state") == {"1": "done", "2": "done"}
    assert column(tmp_path, "attempts") == {"1": "2", "2": "1"} and no_step_twice(tmp_path)


@pytest.mark.slow
def test_a_signal_requeues_and_a_cancelled_job_saves_and_does_not_come_back(
    nodes: Cluster, few_digits: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = start(nodes, *small(few_digits, tmp_path), "run.name=run", "launch=slurm")
    wait_until(trained(run_dir, 5), lambda: output(run_dir))
    slurm(nodes, "scancel", "--signal=USR1", job)
    wait_until(lambda: state(nodes, job)["Restarts"] == "1", lambda: output(run_dir))
    (first,) = run_dir.glob("checkpoints/step-*/COMMITTED")
    wait_until(trained(run_dir, len(records(run_dir, "step")) + 5), lambda: output(run_dir))
    slurm(nodes, "scancel", job)
    ended = wait_for_end(nodes, job, run_dir)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "1")
    wait_until(
        lambda: {first} != set(run_dir.glob("checkpoints/step-*/COMMITTED")),
        lambda: output(run_dir),
    )
    assert not (run_dir / "DONE").exists()
