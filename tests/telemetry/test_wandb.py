"""Weights & Biases for real, offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.schema import Telemetry as TelemetryConfig
from lockstep.telemetry import open_telemetry
from lockstep.telemetry.wandb import WandbSink, _run_id


def config(mode: str = "offline") -> TelemetryConfig:
    return TelemetryConfig(
        console=True,
        console_seconds=10.0,
        wandb=True,
        wandb_project="lockstep-test",
        wandb_mode=mode,  # type: ignore[arg-type]
    )


def step(number: int) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "epoch": 1,
        "loss": 1.5,
        "lr": 0.1,
        "samples_per_second": 100.0,
        "sample_digest": "ab",
    }


EVALUATION = {"kind": "eval", "step": 2, "weights": "ema", "top1": 50.0, "loss": 0.5, "count": 10}


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "absent"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("mode", ["offline", "auto"])
def test_offline_run_holds_records_and_resumes_under_one_id(
    tmp_path: Path, no_credentials: None, capfd: pytest.CaptureFixture[str], mode: str
) -> None:
    pytest.importorskip("wandb")
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    def one_start(*records: dict[str, Any], seed: int) -> str:
        sink = WandbSink(config(mode), run_dir=run_dir, run_name="run", config={"seed": seed})
        for record in records:
            (sink.step if record["kind"] == "step" else sink.evaluation)(record)
        sink.close({"top1": 50.0})
        assert sink.notes[0].startswith("wandb: offline; wandb sync ")
        return sink._run.id

    first = one_start(step(1), step(2), EVALUATION, seed=0)
    second = one_start(step(2), step(3), seed=1)
    assert first == second == (run_dir / "wandb-id").read_text()
    logs = sorted(run_dir.glob(f"wandb/offline-run-*/run-{first}.wandb"))
    assert [b"val_ema/top1" in log.read_bytes() for log in logs] == [True, False]
    assert all(b"train/loss" in log.read_bytes() for log in logs)
    assert capfd.readouterr().out == ""


def test_two_folders_of_one_name_are_two_runs(tmp_path: Path) -> None:
    ids = {_run_id(tmp_path / "a"), _run_id(tmp_path / "b"), _run_id(tmp_path / "a")}
    assert len(ids) == 2


def test_a_missing_package_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    telemetry = open_telemetry(
        config(),
        run_dir=tmp_path,
        config={},
        run_name="run",
        total_steps=1,
        steps_per_epoch=1,
        resume_step=0,
    )
    telemetry.close({})
    assert "wandb is not installed: pip install -e '.[wandb]'" in capsys.readouterr().out


def test_importing_the_sink_does_not_import_wandb() -> None:
    code = "import sys, lockstep.telemetry; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
