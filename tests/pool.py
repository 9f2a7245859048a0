"""Processes that stay alive between tests: importing torch takes longer than most of what they do.

``Pool`` calls a module-level function on n ranks; ``on_group`` gives it a gloo group of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as torch_dist

from tests.conftest import free_port


class Pool:
    """Worker processes, started when they are first needed and ended with the first failure."""

    def __init__(self) -> None:
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on ranks 0..n-1 that the environment describes as torchrun does.

        One rank alone finds nothing there, as under ``train.py``.

        Returns:
            Each rank's result, a plain object. A rank's exception fails the test.
        """
        while len(self._workers) < world_size:
            self._workers.append(_start())
        port = free_port()
        for rank, (_, pipe) in enumerate(self._workers[:world_size]):
            place = _place(rank, world_size, port) if world_size > 1 else {}
            pipe.send((place, function, args))
        pipes = [pipe for _, pipe in self._workers[:world_size]]
        results: dict[int, Any] = {}
        while len(results) < world_size:
            left = [pipe for i, pipe in enumerate(pipes) if i not in results]
            for pipe in multiprocessing.connection.wait(left):
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    failed, results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    failed, results[rank] = True, "the process died"
                if failed:  # its peers may wait for it for ever
                    self.close()
                    raise AssertionError(f"rank {rank} of {world_size}:\n{results[rank]}")
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []


def on_group(function: Callable[..., Any], *args: Any) -> Any:
    """Run by a rank of a pool: ``function(*args)`` within a gloo group."""
    torch_dist.init_process_group("gloo")
    try:
        return function(*args)
    finally:
        torch_dist.destroy_process_group()


def _place(rank: int, world_size: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    place |= {"LOCAL_WORLD_SIZE": world_size}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "localhost"}


def _start() -> tuple[multiprocessing.process.BaseProcess, Connection]:
    # What all of them need is imported once, before any thread or group exists.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.worker", "tests.runs"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            place, function, args = pipe.recv()
        except EOFError:  # the tests are over
            return
        for name in _place(0, 1, 0):
            os.environ.pop(name, None)
        os.environ.update(place)
        try:
            answer = False, function(*args)
        except BaseException:  # noqa: BLE001 - told to the test
            answer = True, traceback.format_exc()
        pipe.send(answer)
