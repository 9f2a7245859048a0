"""Sweeps with the real command and jobs that only pretend to train."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import train
from lockstep.config.cli import read_command
from lockstep.errors import UserError
from lockstep.launch.sweep import Sweep
from lockstep.launch.sweep.ledger import Entry
from lockstep.launch.sweep.prune import is_poor, result
from lockstep.launch.sweep.report import write_reports
from tests.conftest import PATIENCE_SECONDS, opened, wait_until
from tests.launch.sweep_door import main as door
from tests.runs import configure

DOOR = Path(__file__).with_name("sweep_door.py")

Command = Callable[..., tuple[int, str]]


def sweeping(root: Path, *words: str, **env: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """The command, running."""
    here = (f"run.root={root}", "device=cpu")
    return opened(sys.executable, DOOR, "-m", *here, *words, **env)


@pytest.fixture
def sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """``sweep(*words, **env)``: the command in this process; exit code and what it told."""

    def run(*words: str, **env: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["train.py"])
        for name, value in ({"HYDRA_FULL_ERROR": "1", "STUB": ""} | env).items():
            monkeypatch.setenv(name, value)
        code = door(["-m", f"run.root={tmp_path}", "device=cpu", *words])
        return code, capfd.readouterr().err

    with monkeypatch.context() as here:
        here.setattr(train, "Sweep", train.Sweep)  # put back at the end
        yield run


def rows(root: Path) -> list[dict[str, str]]:
    """``sweep.csv``."""
    (path,) = root.glob("sweep-*/sweep.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def column(root: Path, key: str) -> dict[str, str]:
    """A column of ``sweep.csv``, by seed."""
    return {row["seed"]: row[key] for row in rows(root)}


def starts(root: Path) -> dict[str, list[dict[str, Any]]]:
    """What the stub saw each time it began, by seed."""
    found = {p.parent.name.rpartition("seed.")[2]: p for p in root.glob("*/starts")}
    return {seed: [json.loads(x) for x in p.read_text().splitlines()] for seed, p in found.items()}


def no_step_twice(root: Path) -> bool:
    return all(
        path.read_text().split() == [str(step) for step in range(1, 11)]
        for path in root.glob("*/steps")
    )


def test_a_sweep_killed_in_the_middle_is_completed_by_the_same_command(
    tmp_path: Path, sweep: Command
) -> None:
    words = ("seed=range(1,9)", "sweep.jobs=2")
    with sweeping(tmp_path, *words, STUB="wait:4") as process:
        wait_until(lambda: len(list(tmp_path.glob("*/DONE"))) >= 4, "some jobs")
        wait_until(lambda: list(tmp_path.glob("*/waiting")), "the one that is to be killed")
        process.kill()
        process.wait()
        wait_until(
            lambda: not any(Path(f"/proc/{p.name}").exists() for p in (tmp_path / "now").iterdir()),
            "the end of the jobs",
        )
    done = {p.parent.name.rpartition("seed.")[2] for p in tmp_path.glob("*/DONE")}
    assert 4 <= len(done) < 8 and "4" not in done
    code, err = sweep(*words)
    assert code == 0, err
    assert column(tmp_path, "state") == {str(seed): "done" for seed in range(1, 9)}
    assert no_step_twice(tmp_path)
    began = starts(tmp_path)
    assert all(len(began[seed]) == 1 for seed in done)
    assert len(began["4"]) == 2 and column(tmp_path, "attempts")["4"] == "2"
    assert [row["seed"] for row in rows(tmp_path)] == list("87654321")
    code, err = sweep(*words)
    assert code == 0 and err.count("finished before") == 8
    assert starts(tmp_path) == began


def test_failures_do_not_stop_the_others_and_are_tried_again(
    tmp_path: Path, sweep: Command
) -> None:
    words = ("seed=1,2,-3,4", "sweep.jobs=2")
    code, err = sweep(*words, STUB="fail:2")
    assert code == 1, err
    assert err.count("no such luck") == 1 and "error: seed = -3: should be" in err
    assert column(tmp_path, "state") == {"1": "done", "2": "failed", "-3": "failed", "4": "done"}
    code, err = sweep(*words, STUB="fail:2")
    assert code == 2, err
    assert column(tmp_path, "attempts") == {"1": "1", "2": "2", "-3": "0", "4": "1"}
    assert column(tmp_path, "exit_code") == {"1": "0", "2": "0", "-3": "2", "4": "0"}


def test_jobs_share_the_machine(tmp_path: Path, sweep: Command) -> None:
    cores = len(os.sched_getaffinity(0))
    code, err = sweep("seed=range(1,6)", "sweep.jobs=2")
    assert code == 0, err
    seen = [start for (start,) in starts(tmp_path).values()]
    assert max(start["peers"] for start in seen) == 2
    assert {start["cores"] for start in seen} == {max(1, cores // 2)}
    (group,) = {start["group"] for start in seen}
    assert (tmp_path / group / "sweep.csv").exists()


def test_each_job_has_gpus_of_its_own(tmp_path: Path, sweep: Command) -> None:
    words = ("device=auto", "seed=range(1,7)", "sweep.gpus_per_job=2")
    code, err = sweep(*words, CUDA_VISIBLE_DEVICES="0,1,5,7")
    assert code == 0, err
    seen = [start for (start,) in starts(tmp_path).values()]
    assert {start["gpu"] for start in seen} == {"0,1", "5,7"}
    assert not any(start["gpu"] in start["others"] for start in seen)
    assert max(start["peers"] for start in seen) == 2
    code, err = sweep(*words, "seed=8", CUDA_VISIBLE_DEVICES="")
    assert code == 2 and "but 0 GPU(s) are visible" in err


def test_two_sweeps_at_the_same_time_share_the_jobs(tmp_path: Path) -> None:
    words = ("seed=range(1,5)", "sweep.jobs=2")
    with sweeping(tmp_path, *words, STUB="wait:1") as one:
        wait_until(lambda: list(tmp_path.glob("*/waiting")), "the first sweep")
        with sweeping(tmp_path, *words) as two:
            assert two.stderr is not None
            assert any("another sweep has it" in line for line in two.stderr)
            (tmp_path / "go").touch()
            errors = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], errors
    assert {seed: len(began) for seed, began in starts(tmp_path).items()} == {
        str(seed): 1 for seed in range(1, 5)
    }
    assert set(column(tmp_path, "state").values()) == {"done"}


def test_a_request_to_stop_reaches_all_jobs_and_starts_no_other(
    tmp_path: Path, sweep: Command
) -> None:
    words = ("seed=range(1,6)", "sweep.jobs=2")
    with sweeping(tmp_path, *words, STUB="wait:2") as process:
        wait_until(lambda: list(tmp_path.glob("*/waiting")), "the jobs")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 85, err
    states = column(tmp_path, "state")
    assert states["2"] == "stopped" and set(states.values()) <= {"done", "stopped", "waiting"}
    begun = set(starts(tmp_path))
    assert all(states[seed] == "waiting" for seed in states.keys() - begun)
    assert sweep(*words)[0] == 0
    assert no_step_twice(tmp_path)


def test_poor_jobs_are_pruned(tmp_path: Path, sweep: Command) -> None:
    words = ("seed=5,6,7,1,8", "sweep.prune_after=3", "sweep.prune_from=0.3")
    code, err = sweep(*words, "sweep.prune=0.5", STUB="wait:1")
    assert code == 0, err
    assert column(tmp_path, "state") == dict.fromkeys("5678", "done") | {"1": "pruned"}
    assert column(tmp_path, "step")["1"] == "3"
    code, err = sweep(*words, "sweep.prune=0.5")
    assert code == 0 and "pruned before" in err and len(starts(tmp_path)["1"]) == 1
    assert sweep(*words)[0] == 0
    assert column(tmp_path, "state")["1"] == "done" and no_step_twice(tmp_path)


def evaluated(run: Path, top1: dict[int, float]) -> Path:
    """A run of 100 steps whose records say what it had reached when."""
    run.mkdir()
    (run / "plan.json").write_text('{"total_steps": 100}')
    lines = [
        {"kind": "eval", "step": step, "weights": "raw", "top1": value, "top5": 100.0, "loss": 1.0}
        for step, value in top1.items()
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_jobs_that_evaluate_at_other_steps(tmp_path: Path) -> None:
    """``batch.global`` varies. Only who has a figure from before is compared with."""
    rule = configure("sweep.prune=0.5", "sweep.prune_after=2", "sweep.prune_from=0.1").sweep
    others = [
        evaluated(tmp_path / f"other-{number}", {45: 50.0 + number, 90: 60.0})
        for number in range(3)
    ]
    assert not is_poor(evaluated(tmp_path / "early", {12: 1.0, 24: 2.0}), others, rule)
    assert is_poor(evaluated(tmp_path / "late", {24: 2.0, 48: 3.0}), others, rule)
    assert not is_poor(evaluated(tmp_path / "good", {24: 2.0, 48: 52.0}), others, rule)


def test_a_loss_that_is_no_number_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "DONE").write_text('{"step": 4, "top1": 25.0, "top5": 50.0, "loss": NaN}')
    assert result(tmp_path) == {"step": 4, "top1": 25.0, "top5": 50.0}


def test_joblib_starts_the_jobs(tmp_path: Path, sweep: Command) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ("seed=1,2,3", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    code, err = sweep(*words, STUB="fail:2")
    assert code == 1, err
    assert column(tmp_path, "state") == {"1": "done", "2": "failed", "3": "done"}


def test_a_process_of_joblib_passes_on_a_request_to_stop(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ("seed=1,2,3,4", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    with sweeping(tmp_path, *words, STUB="wait:2") as process:
        wait_until(lambda: list(tmp_path.glob("*/waiting")), "the jobs")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 85, err
    assert column(tmp_path, "state")["2"] == "stopped"


def test_optuna_proposes_and_finds_its_finished_trials_again(
    tmp_path: Path, sweep: Command
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = (
        "seed=range(1,30)", "sweep.jobs=2", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=7",
    )  # fmt: skip
    code, err = sweep(*words)
    assert code == 0, err
    best = yaml.safe_load((tmp_path / ".sweep/optimization_results.yaml").read_text())
    top1 = {row["seed"]: float(row["top1"]) for row in rows(tmp_path)}
    assert best["best_value"] == max(top1.values()), "top-1 is to be maximised"
    began = starts(tmp_path)
    assert sweep(*words)[0] == 0
    assert starts(tmp_path) == began and len(began) >= 3


def test_refused_inside_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="without torchrun"):
        Sweep("train.py", read_command(["-m", "seed=1,2"])).begin(OmegaConf.create())


def entry(seed: int, lr: str, model: str, **changes: Any) -> Entry:
    values = {
        "run": f"run-{seed}", "run_dir": f"runs/run-{seed}", "fingerprint": "0a1b2c3d",
        "varied": {"optimizer.lr": lr, "model": model, "seed": str(seed)}, "state": "done",
        "exit_code": 0, "attempts": 1, "seconds": 2.0, "host": "here", "seen": 0.0,
        "metrics": {"step": 10, "top1": 50.0 + seed, "top5": 90.0, "loss": 1.0 + seed},
    }  # fmt: skip
    return Entry(**(values | changes))


@pytest.mark.parametrize("metric, order", [("top1", [4, 1, 0, 3]), ("loss", [0, 1, 4, 3])])
def test_reports(tmp_path: Path, metric: str, order: list[int]) -> None:
    pytest.importorskip("matplotlib")
    entries = [
        entry(0, "0.001", "vit_tiny"),
        entry(1, "0.01", "resnet18", state="pruned"),
        entry(3, "1.0", "vit_tiny", state="failed", exit_code=1, metrics={}),
        entry(4, "0.1", "resnet18", state="stopped", exit_code=85),
    ]
    table = write_reports(tmp_path, entries, metric).splitlines()
    assert table[0].split() == [metric, "state", "exit", "optimizer.lr", "model", "seed", "run"]
    assert [int(line.split()[5]) for line in table[1:5]] == order
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
