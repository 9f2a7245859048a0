"""Helpers of the whole suite: real processes, real commands."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torch_dist
import torch.multiprocessing as mp

REPOSITORY = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 90
"""For a busy machine; nothing that is waited for takes long."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "SLURM_")


def pytest_configure() -> None:
    """A suite started in the background (``&``) ignores Ctrl-C, and its processes would, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what would make a child join a process group."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), kept.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | extra


@contextmanager
def opened(*command: str | Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A command in the repository, running; killed at the end."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=clean_environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Look again and again."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def _one_rank(
    rank: int, world_size: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch_dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    try:
        function(*args)
    finally:
        torch_dist.destroy_process_group()


@pytest.fixture
def run_processes(tmp_path: Path) -> Callable[..., None]:
    """``run_processes(n, function, *args)``: call a module-level function on n gloo ranks.

    The first exception of a rank fails the test.
    """
    calls = 0

    def run(world_size: int, function: Callable[..., Any], *args: Any) -> None:
        nonlocal calls
        calls += 1
        store = str(tmp_path / f"gloo-{calls}")
        mp.spawn(_one_rank, (world_size, store, function, args), nprocs=world_size)

    return run


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``train("key=value", ...)``: run ``train.py`` from the repository, runs below tmp_path."""

    def run(*overrides: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
        place = [] if any("--" in o for o in overrides) else [f"run.root={tmp_path / 'runs'}"]
        return subprocess.run(
            [sys.executable, str(REPOSITORY / "train.py"), *overrides, *place],
            cwd=REPOSITORY,
            env=clean_environment(**env),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """``pool(n, function, *args)``: each rank's result; see tests/pool.py."""
    from tests.pool import Pool

    processes = Pool()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """47 training and 23 validation images of four digits. Do not change."""
    from tests.runs import write_few_digits

    return write_few_digits(tmp_path_factory.mktemp("digits"), train=47, val=23, classes=4)
