from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lockstep.config.cli import read_command
from lockstep.errors import UserError
from lockstep.launch.signals import handling
from lockstep.launch.sweep import Sweep
from tests.conftest import REPOSITORY

SCRIPT = """
import signal, sys, time
from pathlib import Path
args = dict(a.lstrip("+").split("=", 1) for a in sys.argv[1:] if "=" in a)
folder = Path(args["run.root"]) / args["run.name"].strip("'")
folder.mkdir(parents=True)
seed = int(args["seed"])
if seed == 3:
    sys.exit(1)
if seed == 4:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(85))
    (folder / "started").touch()
    time.sleep(60)
(folder / "DONE").write_text('{"top1": %d.5}' % seed)
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return Sweep(str(script), read_command(["-m", "seed=1,2,3,4", f"run.root={tmp_path / 'runs'}"]))


def run(sweep: Sweep, seed: int) -> None:
    root = sweep.command.overrides[-1]
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        raw = compose("config", [root, f"seed={seed}"])
    sweep.run_job(raw, {"model": "vit_tiny"}, [root, f"seed={seed}"])


def test_a_failed_job_does_not_stop_the_others(sweep: Sweep, tmp_path: Path) -> None:
    for seed in (1, 3, -5, 2):
        run(sweep, seed)
    assert [code for _, code in sweep.jobs] == [0, 1, 2, 0]
    assert sweep.exit_code == 1
    rows = [line.split() for line in sweep.table().splitlines()[1:]]
    assert [row[:2] for row in rows] == [["0", "1.50"], ["1", "-"], ["2", "-"], ["0", "2.50"]]
    folders = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert [f.rpartition("-")[2] for f in folders if f.startswith("digits")] == [
        f.rpartition("-")[2] for f in folders
    ]
    assert {f.rpartition("-")[2] for f in folders} == {"seed.1", "seed.2", "seed.3"}


def test_a_request_to_stop_reaches_the_job_and_ends_the_sweep(sweep: Sweep, tmp_path: Path) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "runs").glob("*/started")) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)  # the kernel wakes the main thread

    thread = threading.Thread(target=interrupt)
    thread.start()
    with handling(sweep.on_signal):
        run(sweep, 4)
        run(sweep, 1)
    thread.join()
    assert [code for _, code in sweep.jobs] == [85]
    assert sweep.exit_code == 85


def test_a_sweep_is_refused_inside_a_process_group(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without torchrun"):
        run(sweep, 1)
