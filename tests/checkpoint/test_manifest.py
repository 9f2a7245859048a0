"""Manifests, checksums, the commit mark and the law."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.manifest import (
    COMMITTED,
    MANIFEST,
    Damaged,
    Manifest,
    atomic_write,
    check_law,
    commit,
    describe,
    read_manifest,
    remove,
    step_folders,
    verify,
)
from lockstep.errors import UserError


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Writing beyond ``num_bytes`` fails with EFBIG: the nearest thing to a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def committed(folder: Path, step: int = 3, **files: bytes) -> Manifest:
    folder.mkdir(parents=True)
    for name, data in (files or {"a.bin": b"abc", "b.bin": b""}).items():
        (folder / name).write_bytes(data)
    entries = {path.name: describe(path) for path in sorted(folder.iterdir())}
    manifest = Manifest(step, 97.5, {"law": {"seed": 0}, "none": None, "pair": [1, 2]}, entries)
    commit(folder, manifest)
    return manifest


def test_what_is_committed_is_read_again(tmp_path: Path) -> None:
    manifest = committed(tmp_path / "step-3")
    assert verify(tmp_path / "step-3") == manifest
    assert {p.name for p in (tmp_path / "step-3").iterdir()} == {
        "a.bin",
        "b.bin",
        MANIFEST,
        COMMITTED,
    }


def recommitted(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A manifest of another content under a mark that fits it."""

    def damage(folder: Path) -> None:
        raw = json.loads((folder / MANIFEST).read_text())
        change(raw)
        commit(folder, Manifest(0, None, {}, {}))
        text = json.dumps(raw).encode()
        (folder / MANIFEST).write_bytes(text)
        (folder / COMMITTED).write_text(hashlib.sha256(text).hexdigest())

    return damage


def flip_bit(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage, reason",
    [
        pytest.param(lambda f: (f / COMMITTED).unlink(), "COMMITTED is missing", id="no mark"),
        pytest.param(lambda f: (f / MANIFEST).unlink(), "manifest.json: No such", id="no manifest"),
        pytest.param(lambda f: os.truncate(f / MANIFEST, 9), "manifest.json: checksum", id="torn"),
        pytest.param(lambda f: flip_bit(f / MANIFEST, 40), "manifest.json: checksum", id="altered"),
        pytest.param(lambda f: flip_bit(f / COMMITTED), "manifest.json: checksum", id="mark"),
        pytest.param(lambda f: flip_bit(f / "a.bin"), "shard a.bin: checksum differs", id="bit"),
        pytest.param(
            lambda f: os.truncate(f / "a.bin", 2), "a.bin: 2 bytes instead of 3", id="cut"
        ),
        pytest.param(
            lambda f: os.truncate(f / "b.bin", 4), "b.bin: 4 bytes instead of 0", id="long"
        ),
        pytest.param(lambda f: (f / "a.bin").unlink(), "shard a.bin: No such file", id="missing"),
        pytest.param(
            recommitted(lambda raw: raw.update(format=3)),
            "format 3, this version reads 2",
            id="new",
        ),
        pytest.param(
            lambda f: (f / MANIFEST).write_text('{"format": 1, "step": 7}'),  # by another hash
            "format 1, this version reads 2",
            id="old",
        ),
        pytest.param(recommitted(lambda raw: raw.pop("meta")), "not a manifest", id="lacks a key"),
        pytest.param(recommitted(lambda raw: raw.update(files=[])), "not a manifest", id="no dict"),
        pytest.param(
            recommitted(lambda raw: raw["files"].update({"../x": {"size": 0, "sha256": ""}})),
            "outside the checkpoint",
            id="path that leads out",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    folder = tmp_path / "step-3"
    committed(folder)
    damage(folder)
    with pytest.raises(Damaged) as caught:
        verify(folder)
    assert reason in str(caught.value)


def test_read_manifest_does_not_look_at_the_files(tmp_path: Path) -> None:
    manifest = committed(tmp_path / "step-3")
    (tmp_path / "step-3" / "a.bin").unlink()
    assert read_manifest(tmp_path / "step-3") == manifest


def test_step_folders_are_numbers_newest_first(tmp_path: Path) -> None:
    names = ["step-9", "step-10", "step-10.tmp", "step-", "step-07", "step--1", "step-0", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "step-11").write_text("a file")
    assert step_folders(tmp_path) == [
        (10, tmp_path / "step-10"),
        (9, tmp_path / "step-9"),
        (0, tmp_path / "step-0"),
    ]
    assert step_folders(tmp_path / "absent") == []


def test_remove_takes_the_mark_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step-3"
    committed(folder)
    seen: list[bool] = []
    monkeypatch.setattr("shutil.rmtree", lambda path: seen.append((path / COMMITTED).exists()))
    remove(folder)
    assert seen == [False]


def test_atomic_write_keeps_the_old_content_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")
    with file_size_limit(1000), pytest.raises(OSError):
        atomic_write(path, b"x" * 2000)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


LAW = {"optimizer.lr": 0.1, "data.mean": [0.5, 0.5], "ema.enabled": False, "steps": None}


@pytest.mark.parametrize(
    "current",
    [
        pytest.param(LAW, id="same"),
        pytest.param(LAW | {"data.mean": (0.5, 0.5)}, id="tuple for list"),
        pytest.param(dict(reversed(LAW.items())), id="another order"),
    ],
)
def test_the_same_law(current: dict[str, Any]) -> None:
    check_law(json.loads(json.dumps(LAW)), current)


def test_a_key_that_was_law_once() -> None:
    check_law(LAW | {"data.on_error": "skip"}, LAW | {"data.on_error": "stop"})


@pytest.mark.parametrize(
    "current, line",
    [
        pytest.param(
            LAW | {"optimizer.lr": 0.5}, "optimizer.lr: checkpoint 0.1, now 0.5", id="value"
        ),
        pytest.param(LAW | {"steps": 5}, "steps: checkpoint null, now 5", id="null"),
        pytest.param(LAW | {"x": "y"}, 'x: checkpoint absent, now "y"', id="new key"),
        pytest.param(
            {k: v for k, v in LAW.items() if k != "steps"},
            "steps: checkpoint null, now absent",
            id="lost key",
        ),
    ],
)
def test_another_law_is_refused(current: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        check_law(LAW, current)
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == [f"  {line}"]
    assert "resume=never run.name=" in lines[-1]


def test_many_differences_are_cut_short() -> None:
    with pytest.raises(UserError) as caught:
        check_law({}, {f"key{i:02d}": i for i in range(15)})
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 10 + 1 + 1
    assert lines[-2] == "  and 5 more"
