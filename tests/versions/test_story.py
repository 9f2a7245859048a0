"""The pipeline of dvc.yaml as a whole: docs/rollback.md line by line, interruptions, remotes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY, clean_environment
from tests.runs import records, write_few_digits

pytestmark = pytest.mark.slow

pytest.importorskip("dvc", reason="pip install -e '.[dvc]'")

EVERYTHING = ["check", "prepare", "config", "train", "evaluate", "export"]
SMALL = [
    "device=cpu", "steps=132", "batch.global=16", "data.num_train=null", "data.num_val=null",
    "optimizer.lr=1e-2", "schedule.warmup_epochs=0", "augment=none", "evaluate.every_epochs=100",
    "model.kwargs={channels: [8,16,16,16], layers: [1,1,1,1]}",
]  # fmt: skip
NAMES = (
    ".dvc/config", ".dvc/.gitignore", ".dvcignore", ".gitignore", "data.dvc", "dvc.yaml",
    "params.yaml", "train.py",
)  # fmt: skip
SECONDS = 120
"""Longest wait for something that must happen."""


def environment(root: Path) -> dict[str, str]:
    """With this interpreter as ``python``, its ``dvc``, and an author."""
    names = {f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = clean_environment(**dict.fromkeys(names, "a@b"), DVC_NO_ANALYTICS="1")
    env["PATH"] = f"{root.parent / 'bin'}:{Path(sys.executable).parent}:{env['PATH']}"
    env["PYTHONPATH"] = str(root / "src")
    return env


def run(root: Path, command: str, *, code: int = 0, **env: str) -> str:
    """Run a line of shell there; returns what it said."""
    done = subprocess.run(
        command, shell=True, cwd=root, env=environment(root) | env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def stages_run(said: str) -> list[str]:
    return re.findall(r"Running stage '([^']+)'", said)


def set_overrides(root: Path, overrides: list[str]) -> None:
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["train"] |= {"model": "resnet18", "overrides": overrides}
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))


def top1(root: Path) -> float:
    return float(json.loads((root / "checkpoints/metrics.json").read_text())["top1"])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, str]]]:
    """The repository after the story, and each command with what it said. Do not change."""
    root = tmp_path_factory.mktemp("story") / "clone"
    for name in NAMES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, root / name)
    for name in ("conf", "scripts", "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg*")
        shutil.copytree(REPOSITORY / name, root / name, ignore=ignored)
    # Whatever is installed where: dvc of this very interpreter.
    dvc = root.parent / "bin/dvc"
    dvc.parent.mkdir()
    dvc.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dvc "$@"\n')
    dvc.chmod(0o755)
    set_overrides(root, SMALL)
    run(root, "git init -q && git add -A && git commit -qm start")
    text = (REPOSITORY / "docs/rollback.md").read_text()
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = [line[2:] for block in blocks for line in block.splitlines() if line[:2] == "$ "]
    make, *others = commands
    assert make == "python scripts/prepare_data.py digits"
    write_few_digits(root / "data/digits", train=700, val=150, classes=10)
    return root, [(command, run(root, command)) for command in others]


@pytest.fixture
def root(told: tuple[Path, list[tuple[str, str]]], tmp_path: Path) -> Path:
    """The repository after the story, to be changed."""
    shutil.copytree(told[0].parent, tmp_path / "story", symlinks=True)
    return tmp_path / "story/clone"


@pytest.mark.timeout(900)
def test_story(told: tuple[Path, list[tuple[str, str]]]) -> None:
    root, lines = told

    def said(command: str) -> list[str]:
        found = [output for line, output in lines if line == command]
        assert found, command
        return found

    first, second = said("dvc repro")
    assert stages_run(first) == stages_run(second) == EVERYTHING
    v1, v2 = (
        json.loads(run(root, f"git show {tag}:checkpoints/model.json")) for tag in ("v1", "v2")
    )
    assert v1["metrics"]["top1"] > v2["metrics"]["top1"] + 5, "worse"
    assert {"data", "git", "fingerprint", "metrics", "versions", "recipe"} <= v1.keys()
    assert v1["fingerprint"] == v2["fingerprint"] and v1["data"] != v2["data"]
    assert "top1" in said("dvc metrics diff v1 v2")[0]

    before, after = said("python scripts/rollback.py list")
    header, newest, oldest, *_rest = before.splitlines()
    assert header.split() == [
        "revision",
        "date",
        "data",
        "files",
        "top-1",
        "MB",
        "recipe",
        "subject",
    ]
    assert newest.startswith("*") and f" {v2['metrics']['top1']:.2f} " in newest
    assert f" {v1['metrics']['top1']:.2f} " in oldest and "850" in oldest
    assert [row.startswith("*") for row in after.splitlines()[1:4]] == [True, False, True]
    difference = said("python scripts/rollback.py diff v1 v2")[0]
    assert re.search(r"data/digits/train/3: \d+ added, \d+ removed", difference)
    assert "recipe: the same" in difference

    verified = said("python scripts/rollback.py verify")[0]
    assert verified.splitlines()[-1] == "equal"
    assert f"card  top-1 {v1['metrics']['top1']:.2f} %" in verified
    assert said("dvc status")[0] == "Data and pipelines are up to date.\n"
    assert top1(root) == v1["metrics"]["top1"]


def test_nothing_to_do_and_an_unrelated_edit(root: Path) -> None:
    assert stages_run(run(root, "dvc repro")) == []
    run(root, f"{shlex.quote(sys.executable)} scripts/rollback.py to v1 --data")
    with (root / "conf/model/vit.yaml").open("a") as file:
        file.write("activation_checkpointing: true\n")
    assert stages_run(run(root, "dvc repro")) == ["config"]


def wait_for(happens: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not happens():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def steps(root: Path, known: Iterable[Path]) -> list[int]:
    """Steps that the newest run has recorded."""
    new = [path for path in (root / "runs").iterdir() if path not in known]
    return [r["step"] for run in new if (run / "metrics.jsonl").exists()
            for r in records(run, "step")]  # fmt: skip


def is_training(run_dir: Path) -> bool:
    with (run_dir / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.timeout(600)
def test_interrupted(root: Path, tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM and SIGKILL: the same command goes on, never beside another training."""
    known = set((root / "runs").iterdir())
    set_overrides(root, [*SMALL, "steps=1200", "checkpoint.every_steps=100"])

    def begin(beyond: int) -> subprocess.Popen[bytes]:
        log = (tmp_path / f"{beyond}.log").open("wb")
        process = subprocess.Popen(
            ["dvc", "repro", "train"], cwd=root, env=environment(root), stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        wait_for(lambda: process.poll() is not None or len(steps(root, known)) > beyond)
        assert process.poll() is None, (tmp_path / f"{beyond}.log").read_text()
        return process

    dvc = begin(0)
    os.killpg(dvc.pid, signal.SIGINT)
    assert dvc.wait(SECONDS) != 0
    (run_dir,) = set((root / "runs").iterdir()) - known
    # Not by its exit code: a shell between (dash) tells of the Ctrl-C that it got itself.
    assert "the same command goes on" in (tmp_path / "0.log").read_text(), "saved"

    dvc = begin(len(steps(root, known)))
    dvc.terminate()
    dvc.wait(SECONDS)
    assert is_training(run_dir), "SIGTERM ends DVC alone"
    assert "is in use by process" in run(root, "dvc repro train", code=255)
    os.kill(int((run_dir / "lock").read_text().split()[1]), signal.SIGKILL)
    wait_for(lambda: not is_training(run_dir))
    assert not (run_dir / "DONE").exists()

    assert stages_run(run(root, "dvc repro train")) == ["train"]
    assert Counter(steps(root, known)) == Counter(range(1, 1201)), "one run, each step once"


class Gate:
    """Lets so many requests of a kind through, then holds them until it is opened."""

    def __init__(self, app: Any) -> None:
        self.app, self.open = app, threading.Event()
        self.kind, self.left, self.reached = "", 0, threading.Event()
        self.open.set()

    def close(self, kind: str, after: int) -> None:
        self.kind, self.left = kind, after
        self.reached.clear()
        self.open.clear()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        is_file = "files/md5" in environ["PATH_INFO"]
        if not self.open.is_set() and is_file and environ["REQUEST_METHOD"] == self.kind:
            self.left -= 1
            if self.left < 0:
                self.reached.set()
                self.open.wait(SECONDS)
        return self.app(environ, start_response)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Gate]]:
    """The address of an S3 server of our own with a bucket ``bucket``, and its gate."""
    pytest.importorskip("dvc_s3", reason="pip install -e '.[s3]'")
    moto = pytest.importorskip("moto.server", reason="pip install -e '.[dev]'")
    import boto3
    from werkzeug.serving import make_server

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    gate = Gate(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = make_server("127.0.0.1", 0, gate, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.port}"
    boto3.client("s3", endpoint_url=address).create_bucket(Bucket="bucket")
    yield address, gate
    gate.open.set()
    server.shutdown()
    thread.join()


@pytest.mark.timeout(600)
def test_s3(root: Path, s3: tuple[str, Gate]) -> None:
    """Pushed, wiped, pulled, cut off on either way: the same top-1."""
    address, gate = s3
    run(
        root,
        f"dvc remote add -d s3 s3://bucket/folder && dvc remote modify s3 endpointurl {address}",
    )
    wanted = "build/packed checkpoints/model.safetensors"

    def cut_off(command: str, method: str) -> None:
        gate.close(method, after=3)
        process = subprocess.Popen(command.split(), cwd=root, env=environment(root))
        assert gate.reached.wait(SECONDS)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        gate.open.set()

    cut_off(f"dvc push -q {wanted}", "PUT")
    run(root, f"dvc push {wanted}")
    expected = top1(root)
    for place in (".dvc/cache", "build/packed"):
        shutil.rmtree(root / place)
    (root / "checkpoints/model.safetensors").unlink()
    cut_off(f"dvc pull -q {wanted}", "GET")
    run(root, f"dvc pull {wanted}")
    said = run(root, "python scripts/rollback.py verify")
    assert f"now   top-1 {expected:.2f} %" in said and said.splitlines()[-1] == "equal"
