"""Exchanging files: whole after any interruption."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.versions import swap

BEFORE = {
    "changed.txt": "old",
    "gone/deep/file.txt": "old",
    "folder/a": "old a",
    "folder/b": "old b",
    "was_folder/file": "old",
    "was_file": "old",
    "stays.txt": "same",
}
AFTER = {
    "changed.txt": "new",
    "added/deep/file.txt": "new",
    "folder/a": "new a",
    "folder/c": "new c",
    "was_folder": "new",
    "was_file/file": "new",
    "stays.txt": "same",
}
PATHS = {
    "gone/deep/file.txt": False,
    "was_folder/file": False,
    "was_file": False,
    "changed.txt": True,
    "added/deep/file.txt": True,
    "folder": True,
    "was_folder": True,
    "was_file/file": True,
}


class Killed(BaseException):
    """Ends the process, as far as the code can see."""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def content(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_text() for path in files}


def begin(tmp_path: Path) -> tuple[Path, Path, swap.Journal]:
    root, state = tmp_path / "root", tmp_path / "state"
    write(root, BEFORE)
    new = swap.start(state)
    write(new, {k: v for k, v in AFTER.items() if k != "stays.txt"})
    return root, state, swap.Journal(PATHS, "b", "a")


CALLS = [("rename", n) for n in range(13)] + [("mkdir", n) for n in range(9)]


@pytest.mark.parametrize(("call", "survived"), CALLS, ids=[f"{c} {n}" for c, n in CALLS])
def test_killed_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, survived: int
) -> None:
    root, state, journal = begin(tmp_path)
    swap.commit(state, journal)
    really, left = getattr(os, call), [survived]

    def dies(*args: object, **kwargs: object) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        really(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, call, dies)
        swap.move(root, state, journal)
        raise Killed  # all of its calls survived
    again = swap.pending(state)
    assert again == journal
    swap.move(root, state, again)
    swap.move(root, state, again)  # killed after the last one
    assert content(root) == AFTER
    assert not (root / "gone").exists(), "empty folders go"
    swap.finish(state)
    assert not state.exists() and swap.pending(state) is None


def test_nothing_changes_before_the_journal(tmp_path: Path) -> None:
    root, state, _ = begin(tmp_path)
    assert content(root) == BEFORE and swap.pending(state) is None
    assert list(swap.start(state).iterdir()) == []


def test_a_torn_journal_names_the_folders(tmp_path: Path) -> None:
    (tmp_path / "journal.json").write_text("{")
    with pytest.raises(UserError, match="not the journal of a rollback"):
        swap.pending(tmp_path)


@pytest.mark.parametrize(
    ("present", "found"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({"added/deep/file.txt": "x"}, ["added/deep/file.txt"], id="file"),
        pytest.param({"added/deep/file.txt/x": "x"}, ["added/deep/file.txt"], id="folder"),
        pytest.param({"added": "x"}, ["added"], id="file for a folder"),
        pytest.param({"was_folder/more": "x"}, ["was_folder"], id="more in the folder"),
        pytest.param({"elsewhere": "x"}, [], id="elsewhere"),
    ],
)
def test_in_the_way(tmp_path: Path, present: dict[str, str], found: list[str]) -> None:
    write(tmp_path, BEFORE)
    if "added" in present:
        shutil.rmtree(tmp_path / "added", ignore_errors=True)
    write(tmp_path, present)
    assert swap.in_the_way(tmp_path, PATHS, ["changed.txt", "folder", "was_file"]) == found
