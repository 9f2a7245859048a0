"""Files that are asked for on a command line: whole or not at all, and nothing else in their place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep.door import aligned, save_json
from lockstep.errors import UserError
from tests.checkpoint.test_manifest import file_size_limit


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    save_json(path, {"a": 1})
    with file_size_limit(1000), pytest.raises(UserError, match="--json"):
        save_json(path, {"a": "x" * 2000})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    for values in ([1], [2]):  # the first makes the target
        save_json(link, values)
        assert link.is_symlink() and json.loads(target.read_text()) == values


def test_stdout_keeps_what_is_printed(tmp_path: Path) -> None:
    program = (
        "from lockstep.door import aligned, save_json; from pathlib import Path; print('before');"
    )
    program += "save_json(Path('/dev/stdout'), [1]); print('after')"
    out = tmp_path / "out.txt"
    with out.open("wb") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, check=True)
    assert out.read_text().split() == ["before", "[", "1", "]", "after"]


def test_a_name_that_no_file_can_have() -> None:
    with pytest.raises(UserError, match="cannot be written: File name too long"):
        save_json(Path("x" * 300), [1])


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=save_json, args=(pipe, [1]))
    writer.start()
    assert json.loads(pipe.read_text()) == [1]
    writer.join()
    assert pipe.is_fifo()


def test_nothing_asked_for() -> None:
    save_json(None, [1])


def test_columns_are_aligned() -> None:
    rows = [["a", "step", "why"], ["bcd", "10", ""], ["e", "7", "x"]]
    assert aligned(rows, right=(1,)) == ["a    step  why", "bcd    10", "e       7  x"]
