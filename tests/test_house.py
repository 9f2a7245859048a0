"""The house rules that a reader relies on: imports go down, ranks are known in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "src/lockstep"
LEVELS = {
    "door": 0, "durable": 0, "errors": 0, "machine": 0, "memory": 0, "parent": 0, "config": 0,
    "dist": 1,
    "data": 2, "models": 2, "optim": 2, "metrics": 2,
    "strategy": 3,
    "checkpoint": 4, "telemetry": 4,
    "engine": 5,
    "worker": 6, "evaluation": 6,
    "launch": 7,
    "doctor": 8, "drill": 8, "versions": 8,
}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))
RANK_NAMES = ("get_rank", "RANK", "LOCAL_RANK", "WORLD_SIZE", "get_world_size")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def imported_rooms(path: Path) -> set[str]:
    parts = [name.split(".") for _, name in imported(path)]
    return {p[1] for p in parts if p[0] == "lockstep" and len(p) > 1 and p[1] in LEVELS}


@pytest.mark.parametrize("path", FILES, ids=[str(f.relative_to(PACKAGE)) for f in FILES])
def test_imports_go_down(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        assert imported_rooms(path) == set()
        return
    assert here in LEVELS, "a new room needs a level"
    up = {
        other
        for other in imported_rooms(path) - {here}
        if LEVELS[other] > LEVELS[here] or (LEVELS[other] == LEVELS[here] != 0)
    }
    assert up == set(), f"{here} is on level {LEVELS[here]}"


@pytest.mark.parametrize("name", ["config", "errors"])
def test_no_torch_on_level_0(name: str) -> None:
    for path in (f for f in FILES if room(f) == name):
        heavy = [m for _, m in imported(path) if m.split(".")[0] in ("torch", "timm", "numpy")]
        assert heavy == [], path


def test_ranks_are_known_in_one_place() -> None:
    found = []
    for path in FILES:
        if room(path) in ("dist", "launch"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and node.attr in RANK_NAMES
            quoted = isinstance(node, ast.Constant) and node.value in RANK_NAMES
            if named or quoted:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert found == []


def test_the_door_knows_config_and_launch_alone() -> None:
    assert imported_rooms(REPOSITORY / "train.py") <= {"config", "launch", "errors"}


def test_only_the_worker_builds() -> None:
    """The engine tells the story of parts that it has been given."""
    for path in (f for f in FILES if room(f) == "engine"):
        builders = [m for _, m in imported(path) if m.rpartition(".")[2].startswith("build")]
        assert builders == [], path
