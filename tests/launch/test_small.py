"""Signals, presets, reports and the lock, each by itself."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.manifest import Manifest, commit
from lockstep.config.bind import law, load_config, save_config
from lockstep.config.schema import Config, Nccl
from lockstep.data import open_split
from lockstep.errors import NotBegun, Stopped, UserError
from lockstep.launch import check_images, folder, nccl
from lockstep.launch.folder import again, run_lock
from lockstep.launch.report import Report, clear_report, read_reports
from lockstep.launch.signals import STOP_SIGNALS, StopFlag, refusing_to_start
from tests.conftest import clean_environment
from tests.runs import configure, plan_of


@pytest.mark.parametrize("resume, words", [("auto", ""), ("never", " without resume=never")])
def test_what_the_same_command_would_do(tmp_path: Path, resume: str, words: str) -> None:
    config, run_dir = Config.model_construct(resume=resume, stop_at=4), tmp_path / "run"
    assert again(run_dir, config) == "nothing was saved yet: the same command starts anew"
    (run_dir / "checkpoints/step-3").mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    assert again(run_dir, config) == f"nothing was saved yet: the same command{words} starts anew"
    commit(run_dir / "checkpoints/step-3", Manifest(step=3, metric=None, meta={}, files={}))
    assert again(run_dir, config) == f"the same command{words} goes on from {run_dir}"
    config = Config.model_construct(resume="auto", stop_at=3)
    assert again(run_dir, config) == f"the same command without stop_at goes on from {run_dir}"


@pytest.mark.parametrize("signum", STOP_SIGNALS, ids=lambda s: s.name)
def test_stop_flag_listens_from_the_first_reading_on(signum: signal.Signals) -> None:
    before = [signal.getsignal(s) for s in STOP_SIGNALS]
    with refusing_to_start(), StopFlag(last_chance=False) as stop:
        with pytest.raises(NotBegun, match=signum.name):
            signal.raise_signal(signum)
        with pytest.raises(NotBegun, match=signum.name):  # whoever was interrupted may lose it
            _ = stop.requested
    assert [signal.getsignal(s) for s in STOP_SIGNALS] == before
    with refusing_to_start(), StopFlag(last_chance=False) as stop:  # another run in this process
        assert stop.requested is None
        signal.raise_signal(signum)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested == signum.name
    assert [signal.getsignal(s) for s in STOP_SIGNALS] == before


def test_a_second_ctrl_c_ends_a_process_of_its_own() -> None:
    with StopFlag(last_chance=True) as stop:
        assert stop.requested is None
        signal.raise_signal(signal.SIGINT)
        assert stop.requested == "SIGINT"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL


def test_what_the_shell_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with refusing_to_start():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_preset_does_not_override_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_STUB_SET", "mine")
    monkeypatch.setenv("NCCL_STUB_SAME", "2")
    monkeypatch.delenv("NCCL_STUB_NEW", raising=False)
    nccl.apply(
        Nccl(name="x", env={"NCCL_STUB_SET": "theirs", "NCCL_STUB_SAME": 2, "NCCL_STUB_NEW": 1})
    )
    assert [os.environ.pop(n) for n in ("NCCL_STUB_SET", "NCCL_STUB_SAME", "NCCL_STUB_NEW")] == [
        "mine",
        "2",
        "1",
    ]
    assert capsys.readouterr().err.splitlines() == [
        "note: NCCL_STUB_SET=mine from your environment stays (nccl=x would set theirs)"
    ]


def test_reports_put_the_cause_first(tmp_path: Path) -> None:
    lost = RuntimeError("Connection closed by peer [127.0.0.1]:5")
    for rank, error in enumerate([lost, ValueError("the cause"), Stopped("saved")]):
        Report.of(error, rank).write(tmp_path)
    found = read_reports(tmp_path)
    assert [(r.rank, r.kind) for r in found] == [(1, "crash"), (2, "stopped"), (0, "crash")]
    assert Report.of(NotBegun("asked"), 3).kind == "stopped"
    assert "ValueError: the cause" in found[0].traceback
    (tmp_path / "error-rank-1.json").write_text("{torn")
    assert [r.rank for r in read_reports(tmp_path)] == [2, 0]
    for rank in (0, 1, 3):
        clear_report(tmp_path, rank)
    assert [path.name for path in tmp_path.iterdir()] == ["error-rank-2.json"]


def test_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from lockstep.launch.folder import run_lock\n"
        "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        message = f"in use by process {holder.pid} on .* since "
        with pytest.raises(UserError, match=message), run_lock(tmp_path):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with run_lock(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / "lock").read_text()


def test_what_made_a_checkpoint_is_asked_of_it(tmp_path: Path) -> None:
    """A damaged config.yaml does not let another configuration take its place."""
    mine, other = configure("optimizer.lr=0.001"), configure("optimizer.lr=0.5")
    plan, checkpoint = plan_of(mine), tmp_path / "checkpoints/step-3"
    checkpoint.mkdir(parents=True)
    commit(checkpoint, Manifest(step=3, metric=None, meta={"law": law(mine)}, files={}))
    (tmp_path / "config.yaml").write_text("torn: [")
    with pytest.raises(UserError, match=r"optimizer\.lr"), folder.claim(tmp_path, other, plan):
        pass
    assert (tmp_path / "config.yaml").read_text() == "torn: ["
    with folder.claim(tmp_path, mine, plan):
        assert load_config(tmp_path / "config.yaml") == mine


def test_other_images_are_another_run(
    tmp_path: Path, few_digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def at(root: Path) -> Config:
        return configure("data=folder", f"data.root={root}")

    run_dir, moved = tmp_path / "run", shutil.copytree(few_digits, tmp_path / "moved")
    checkpoint = run_dir / "checkpoints/step-3"
    checkpoint.mkdir(parents=True)
    known = {s: open_split(at(few_digits).data, s).digest for s in ("train", "val")}
    commit(checkpoint, Manifest(step=3, metric=None, meta={"data": known}, files={}))
    save_config(at(few_digits), run_dir / "config.yaml")
    check_images(at(few_digits), run_dir)
    assert capsys.readouterr().err == ""
    check_images(at(moved), run_dir)
    assert (
        f"data.root = {moved}: the images of {run_dir} were in {few_digits}"
        in capsys.readouterr().err
    )
    next(moved.glob("val/*/*")).unlink()
    with pytest.raises(UserError, match="are others: give other images a run"):
        check_images(at(moved), run_dir)
    with pytest.raises(UserError, match="does not exist"):
        check_images(at(tmp_path / "gone"), run_dir)


def test_a_disk_that_is_full_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = configure()
    for owner, name, file in ((os, "write", "lock"), (folder, "save_config", "config.yaml")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, full)
            message = rf"run\.root = .*cannot write .*{file}: No space left"
            with (
                pytest.raises(UserError, match=message),
                folder.claim(tmp_path / "run", config, plan_of(config)),
            ):
                raise AssertionError("claimed")


def test_lock_in_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = r"run\.root = .*cannot write"
    with pytest.raises(UserError, match=message), run_lock(tmp_path / "file/run"):
        pass
