"""Checkpoints seen from outside: plain files, no tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import manage, manifest
from lockstep.checkpoint.manage import best, prune, step_folder, survey
from lockstep.checkpoint.manifest import COMMITTED, MANIFEST, Manifest, commit, describe
from lockstep.errors import UserError
from tests.checkpoint.test_manifest import flip_bit

SHARD = "__0_0.distcp"


def write(run_dir: Path, step: int, metric: Any = None, *, named: str | None = None) -> Path:
    """A committed checkpoint of one shard."""
    folder = run_dir / "checkpoints" / (named or f"step-{step}")
    folder.mkdir(parents=True)
    (folder / SHARD).write_bytes(b"weights of step %d" % step)
    commit(folder, Manifest(step, metric, {}, {SHARD: describe(folder / SHARD)}))
    return folder


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


def truncate(folder: Path) -> None:
    (folder / SHARD).write_bytes(b"weights")


SPOILED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "flipped bit": (lambda f: flip_bit(f / SHARD), "damaged", f"shard {SHARD}: checksum differs"),
    "torn": (truncate, "damaged", f"shard {SHARD}: 7 bytes instead of 17"),
    "shard gone": (lambda f: (f / SHARD).unlink(), "damaged", "No such file"),
    "manifest gone": (lambda f: (f / MANIFEST).unlink(), "damaged", f"{MANIFEST}: No such file"),
    "manifest altered": (
        lambda f: (f / MANIFEST).write_text("{}") and None, "damaged", "checksum differs"
    ),
    "renamed": (lambda f: f.rename(f.with_name("step-9")), "damaged", "holds step 2"),
    "figure that is none": (
        lambda f: commit(f, Manifest(2, "9", {}, {})), "damaged", "its figure is '9'"  # type: ignore[arg-type]
    ),
    "infinite figure": (
        lambda f: commit(f, Manifest(2, float("inf"), {}, {})), "damaged", "its figure is inf"
    ),
    "half deleted": (lambda f: (f / COMMITTED).unlink(), "partial", f"{COMMITTED} is missing"),
    "leftover": (lambda f: f.rename(f.with_name("step-3.tmp")), "partial", "did not end"),
}  # fmt: skip


@pytest.mark.parametrize("spoil, state, why", SPOILED.values(), ids=SPOILED)
def test_survey_says_what_is_wrong(
    tmp_path: Path, spoil: Callable[[Path], Any], state: str, why: str
) -> None:
    write(tmp_path, 1, 50.0)
    spoil(write(tmp_path, 2, 90.0))
    entries = survey(tmp_path, thorough=True)
    (good,) = (e for e in entries if e.state == "good")
    (spoiled,) = (e for e in entries if e.state != "good")
    assert (good.step, good.metric, good.why) == (1, 50.0, "")
    assert good.size == sum(p.stat().st_size for p in good.path.iterdir())
    assert good.committed_at == (good.path / COMMITTED).stat().st_mtime
    assert spoiled.state == state and why in spoiled.why
    assert best(entries) is good


def test_only_a_thorough_survey_reads_the_shards(tmp_path: Path) -> None:
    flip_bit(write(tmp_path, 1) / SHARD)
    assert [e.state for e in survey(tmp_path, thorough=False)] == ["good"]
    assert [e.state for e in survey(tmp_path, thorough=True)] == ["damaged"]


@pytest.mark.parametrize(
    "keep_last, keep_best, metrics, kept",
    [
        pytest.param(1, False, [9.0, 2.0, 3.0], {3}, id="last"),
        pytest.param(2, False, [9.0, 2.0, 3.0], {2, 3}, id="last two"),
        pytest.param(9, False, [1.0, 2.0], {1, 2}, id="fewer than allowed"),
        pytest.param(1, True, [1.0, 9.0, 3.0], {2, 3}, id="best"),
        pytest.param(1, True, [1.0, 2.0, 9.0], {3}, id="best is last"),
        pytest.param(1, True, [5.0, 5.0, 1.0], {1, 3}, id="earliest of equals"),
        pytest.param(1, True, [None, None, None], {3}, id="never evaluated"),
        pytest.param(1, True, [-2.0, -1.0, -3.0], {2, 3}, id="negative"),
    ],
)
def test_prune_keeps_what_a_save_would(
    tmp_path: Path, keep_last: int, keep_best: bool, metrics: list[float | None], kept: set[int]
) -> None:
    for step, metric in enumerate(metrics, start=1):
        write(tmp_path, step, metric)
    before = names(tmp_path)
    options = {"keep_last": keep_last, "keep_best": keep_best}
    wanted = prune(tmp_path, **options, dry_run=True)
    assert names(tmp_path) == before
    assert prune(tmp_path, **options, dry_run=False) == wanted
    assert names(tmp_path) == {e.path.name for e in wanted[0]} == {f"step-{step}" for step in kept}


def test_prune_never_deletes_the_newest_good_one(tmp_path: Path) -> None:
    """Whatever lies after it, and whatever its figure is."""
    for step, metric in enumerate([80.0, 90.0, 10.0, 95.0, 99.0], start=1):
        write(tmp_path, step, metric)
    checkpoints = tmp_path / "checkpoints"
    flip_bit(checkpoints / "step-2" / SHARD)  # the best of those that look good
    truncate(checkpoints / "step-4")
    (checkpoints / "step-5" / COMMITTED).unlink()
    (write(tmp_path, 6, named="step-6.tmp") / COMMITTED).unlink()
    kept, deleted = prune(tmp_path, keep_last=1, keep_best=True, dry_run=False)
    assert [e.step for e in kept] == [3, 1]
    assert [e.path.name for e in deleted] == ["step-5", "step-4", "step-2", "step-6.tmp"]
    assert names(tmp_path) == {"step-3", "step-1"}


def test_a_save_killed_before_its_renaming_is_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)
    complete = write(tmp_path, 2, named="step-2.tmp")
    again = write(tmp_path, 1, named="step-1.tmp")
    kept, deleted = prune(tmp_path, keep_last=1, keep_best=False, dry_run=True)
    assert [e.path for e in kept] == [complete]
    assert [e.path.name for e in deleted] == ["step-1", again.name]


def test_prune_mends_the_link_to_the_latest(tmp_path: Path) -> None:
    write(tmp_path, 1)
    truncate(write(tmp_path, 2))
    latest = tmp_path / "checkpoints" / manifest.LATEST
    latest.symlink_to("step-2")
    prune(tmp_path, keep_last=1, keep_best=False, dry_run=False)
    assert latest.readlink() == Path("step-1")
    assert [e.step for e in survey(tmp_path, thorough=True)] == [1]


def test_prune_deletes_nothing_where_nothing_is_good(tmp_path: Path) -> None:
    flip_bit(write(tmp_path, 1) / SHARD)
    (write(tmp_path, 2, named="step-2.tmp") / COMMITTED).unlink()
    with pytest.raises(UserError, match="no good checkpoint; nothing was deleted"):
        prune(tmp_path, keep_last=1, keep_best=False, dry_run=False)
    assert names(tmp_path) == {"step-1", "step-2.tmp"}


def test_prune_of_a_link_deletes_the_link_alone(tmp_path: Path) -> None:
    other = write(tmp_path / "other", 1)
    write(tmp_path / "run", 2)
    (tmp_path / "run/checkpoints/step-1").symlink_to(other)
    (tmp_path / "run/checkpoints/step-3.tmp").symlink_to(other)
    prune(tmp_path / "run", keep_last=1, keep_best=False, dry_run=False)
    assert names(tmp_path / "run") == {"step-2"}
    assert [e.state for e in survey(tmp_path / "other", thorough=True)] == ["good"]


def test_prune_says_what_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write(tmp_path, step)

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(manage, "remove", refuse)
    with pytest.raises(UserError, match=r"step-1: cannot be deleted \(Operation not permitted\)"):
        prune(tmp_path, keep_last=1, keep_best=False, dry_run=False)


def test_step_folder(tmp_path: Path) -> None:
    write(tmp_path, 40)
    assert step_folder(tmp_path, 40).name == "step-40"
    with pytest.raises(UserError, match=r"--step 4: .* its steps: 40"):
        step_folder(tmp_path, 4)


@pytest.mark.parametrize(
    "look",
    [lambda run: survey(run, thorough=False), lambda run: step_folder(run, 1)],
    ids=["survey", "step"],
)
def test_no_run_folder(tmp_path: Path, look: Callable[[Path], Any]) -> None:
    with pytest.raises(UserError, match="holds no checkpoints"):
        look(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        look(tmp_path / "gone")
