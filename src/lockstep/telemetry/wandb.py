"""Weights & Biases: a view of the run in the browser. Imported only when it is asked for."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from lockstep.config.schema import Telemetry as TelemetryConfig
from lockstep.telemetry.records import Record, Sink

_PREFIX = {"raw": "val", "ema": "val_ema"}


class WandbSink(Sink):
    """One W&B run per run folder, whatever interrupts it.

    The run's id is drawn once and kept in the folder (``wandb-id``): a resumed run goes on in the
    same W&B run, and a folder of the same name elsewhere is another one. W&B's own step may not go
    back as a resumed run does, so ours is logged as the axis of every chart.
    """

    name = "wandb"

    def __init__(
        self, cfg: TelemetryConfig, *, run_dir: Path, run_name: str, config: dict[str, Any]
    ) -> None:
        """
        Raises:
            ImportError: names the extra to install.
        """
        try:
            import wandb
        except ImportError as exc:
            raise ImportError("wandb is not installed: pip install -e '.[wandb]'") from exc
        self._wandb = wandb
        self._run = wandb.init(
            project=cfg.wandb_project,
            name=run_name,
            id=_run_id(run_dir / "wandb-id"),
            resume="allow",
            dir=run_dir,
            mode=_mode(cfg),
            config=config,
            allow_val_change=True,
            # Our console owns the terminal, and a warning of ours replaces W&B's own prompts.
            settings=wandb.Settings(console="off", silent=True),
        )
        folder = Path(self._run.dir).parent
        place = f"offline; wandb sync {folder}" if self._run.offline else self._run.url
        self.notes = [f"wandb: {place}"]
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, record: Record) -> None:
        figures = {f"train/{k}": v for k, v in record.items() if _is_figure(k, v)}
        self._run.log({"step": record["step"], **figures})

    def evaluation(self, record: Record) -> None:
        prefix = _PREFIX[record["weights"]]
        figures = {f"{prefix}/{k}": v for k, v in record.items() if _is_figure(k, v)}
        self._run.log({"step": record["step"], **figures})

    def close(self, summary: dict[str, Any] | None) -> None:
        self._run.summary.update(summary or {})
        self._run.finish(exit_code=1 if summary is None else 0)
        # finish() does not wait for the file of an offline run; ending W&B's own process does.
        self._wandb.teardown()


def _is_figure(key: str, value: Any) -> bool:
    return key != "step" and isinstance(value, int | float)


def _mode(cfg: TelemetryConfig) -> Any:
    """W&B's ``mode``; None leaves it to W&B, which reads WANDB_MODE."""
    if cfg.wandb_mode != "auto":
        return cfg.wandb_mode
    if "WANDB_MODE" in os.environ:
        return None
    import wandb

    # Looks for credentials without a question and without the network.
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def _run_id(path: Path) -> str:
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()
