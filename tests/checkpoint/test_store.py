"""Saves that survive crashes, full disks and bit rot, on real processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import dist
from lockstep.checkpoint import manifest, saver, shards
from lockstep.checkpoint.manifest import COMMITTED, MANIFEST, read_manifest
from lockstep.checkpoint.store import Found, Store, find_checkpoint
from lockstep.errors import UserError
from tests.checkpoint.test_manifest import file_size_limit, flip_bit

META: dict[str, Any] = {"law": {"seed": 0}, "progress": {"step": 1, "best": None}}


def tensors(value: float, size: int = 6) -> shards.Tensors:
    return {
        "model": {"weight": torch.full((size, 2), value), "scale": torch.tensor(value)},
        "optimizer": {"state.weight.step": torch.tensor(value)},
    }


def open_store(
    run_dir: Path, *, keep_last: int = 2, keep_best: bool = False, asynchronous: bool = False
) -> Store:
    return Store(run_dir, keep_last=keep_last, keep_best=keep_best, asynchronous=asynchronous)


def saved(run_dir: Path, *steps: int, **options: Any) -> Store:
    result = open_store(run_dir, **options)
    for step in steps:
        result.save(step, tensors(float(step)), META | {"saved": step}, metric=None)
    return result


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()} - {manifest.LATEST}


def found_step(run_dir: Path) -> int:
    """The step that a fresh process would go on from, after loading it."""
    fresh = open_store(run_dir)
    found = fresh.find()
    assert found is not None
    target = tensors(-1.0)
    meta = fresh.load(found, target)
    assert meta == META | {"saved": found.step}
    assert set(target["model"]["weight"].flatten().tolist()) == {found.step}
    return found.step


def found_nothing(run_dir: Path) -> bool:
    return not list((run_dir / "checkpoints").glob("step-*/COMMITTED"))


# --- saving and retaining ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "keep_last, keep_best, metrics, kept",
    [
        pytest.param(1, False, [1.0, 2.0, 3.0], {3}, id="last one"),
        pytest.param(2, False, [9.0, 2.0, 3.0], {2, 3}, id="last two"),
        pytest.param(9, False, [1.0, 2.0], {1, 2}, id="fewer than allowed"),
        pytest.param(1, True, [1.0, 9.0, 3.0, 4.0], {2, 4}, id="best"),
        pytest.param(1, True, [1.0, 2.0, 9.0], {3}, id="best is last"),
        pytest.param(1, True, [5.0, 5.0, 1.0], {1, 3}, id="earliest of equals"),
        pytest.param(1, True, [None, None, None], {3}, id="never evaluated"),
        pytest.param(1, True, [None, 4.0, None, None], {2, 4}, id="evaluated once"),
        pytest.param(1, True, [math.nan, 0.0, math.inf, None], {2, 4}, id="non-finite"),
        pytest.param(1, True, [-2.0, -1.0, -3.0], {2, 3}, id="negative"),
    ],
)
def test_retention(
    tmp_path: Path, keep_last: int, keep_best: bool, metrics: list[float | None], kept: set[int]
) -> None:
    checkpoints = open_store(tmp_path, keep_last=keep_last, keep_best=keep_best)
    for step, metric in enumerate(metrics, start=1):
        checkpoints.save(step, tensors(float(step)), META, metric=metric)
    assert names(tmp_path) == {f"step-{step}" for step in kept}


def test_an_intact_step_is_not_saved_again(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    inode = (tmp_path / "checkpoints" / "step-1").stat().st_ino
    checkpoints.save(1, tensors(1.0), META, metric=None)
    assert (tmp_path / "checkpoints" / "step-1").stat().st_ino == inode


def test_a_damaged_step_is_saved_again(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    flip_bit(tmp_path / "checkpoints" / "step-2" / "__0_0.distcp")
    assert found_step(tmp_path) == 1
    saved(tmp_path, 2)
    assert found_step(tmp_path) == 2


def test_damaged_checkpoints_do_not_push_out_good_ones(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, keep_last=3)
    for step in (2, 3):
        flip_bit(tmp_path / "checkpoints" / f"step-{step}" / "__0_0.distcp")
    resumed = open_store(tmp_path, keep_last=2)
    assert resumed.find() is not None
    resumed.save(2, tensors(2.0), META | {"saved": 2}, metric=None)
    assert names(tmp_path) == {"step-1", "step-2"}
    assert found_step(tmp_path) == 2


def test_what_cannot_be_deleted_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, 1, keep_last=1)

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    with monkeypatch.context() as patched:
        patched.setattr(saver, "remove", refuse)
        checkpoints.save(2, tensors(2.0), META | {"saved": 2}, metric=None)
    assert names(tmp_path) == {"step-1", "step-2"}
    checkpoints.save(3, tensors(3.0), META | {"saved": 3}, metric=None)
    assert names(tmp_path) == {"step-3"}


def test_the_metric_of_a_step_may_come_later(tmp_path: Path) -> None:
    """Stopped in the evaluation: saved without, and once more with what the next start found."""
    checkpoints = saved(tmp_path, 1)
    checkpoints.save(1, tensors(1.0), META | {"saved": 1}, metric=50.0)
    found = open_store(tmp_path).find()
    assert found is not None and read_manifest(found.path).metric == 50.0
    checkpoints.save(1, tensors(1.0), META | {"saved": 1}, metric=None)
    found = open_store(tmp_path).find()
    assert found is not None and read_manifest(found.path).metric == 50.0


def test_latest_leads_to_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    assert (tmp_path / "checkpoints" / manifest.LATEST).readlink() == Path("step-3")


def test_the_records_come_back_with_the_checkpoint(tmp_path: Path) -> None:
    records = tmp_path / saver.RECORDS
    records.write_text("1\n")
    checkpoints = saved(tmp_path, 1)
    for damage in (lambda: records.write_text("?"), records.unlink):
        damage()
        found = checkpoints.find()
        assert found is not None
        checkpoints.load(found, tensors(-1.0))
        assert records.read_text() == "1\n"


# --- behind the training ----------------------------------------------------------------------


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Store]:
    checkpoints = open_store(tmp_path, keep_last=9, asynchronous=True)
    yield checkpoints
    checkpoints.close()


def test_what_changes_after_save_is_not_saved(behind: Store, tmp_path: Path) -> None:
    live = tensors(1.0)
    behind.save(1, live, META | {"saved": 1}, metric=None)
    behind.before_update()
    for group in live.values():
        for tensor in group.values():
            tensor.fill_(-7.0)
    behind.approve(1)
    behind.wait()
    assert found_step(tmp_path) == 1


def test_a_step_that_turns_out_bad_is_not_saved(behind: Store, tmp_path: Path) -> None:
    saved(tmp_path, 1)
    behind.save(2, tensors(2.0), META | {"saved": 2}, metric=None)
    behind.approve(1)
    assert behind.unapproved
    behind.wait()
    assert names(tmp_path) == {"step-1"}


def test_one_save_after_another(behind: Store, tmp_path: Path) -> None:
    for step in range(1, 6):
        behind.save(step, tensors(float(step)), META | {"saved": step}, metric=None)
        behind.approve(step)
    behind.wait()
    assert names(tmp_path) == {f"step-{step}" for step in range(1, 6)}
    assert found_step(tmp_path) == 5


def test_what_is_written_is_what_a_waiting_save_writes(behind: Store, tmp_path: Path) -> None:
    """Shapes, dtypes and names, of empty, scalar and large tensors."""
    state = {
        "model": {
            "a.weight": torch.randn(3, 5, 2, 2).to(memory_format=torch.channels_last),
            "half": torch.randn(1000).bfloat16(),
            "empty": torch.empty(0, 4),
            "count": torch.tensor(7),
        },
        "optimizer": {"state.a.weight.step": torch.tensor(3.0), "view": torch.arange(10.0)[2:5]},
    }
    behind.save(1, state, META, metric=5.0)
    behind.approve(1)
    behind.wait()
    found = behind.find()
    assert found is not None and read_manifest(found.path).metric == 5.0
    torch.testing.assert_close(Store.load_full(found), state, rtol=0, atol=0)


def test_a_failed_save_is_known_and_told_by_the_next(behind: Store, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    behind.save(2, tensors(2.0), META, metric=None)
    behind.approve(2)
    while not behind.failed:
        time.sleep(0.01)
    with pytest.raises(UserError, match="while saving step 2"):
        behind.save(3, tensors(3.0), META, metric=None)
    assert not behind.failed
    (tmp_path / "checkpoints").unlink()
    behind.save(3, tensors(3.0), META | {"saved": 3}, metric=None)
    behind.approve(3)
    behind.wait()
    assert found_step(tmp_path) == 3


def test_a_killed_writer_is_told(behind: Store, tmp_path: Path) -> None:
    process = behind.reserve(tensors(1.0))._process
    process.kill()
    behind.save(1, tensors(1.0), META, metric=None)
    behind.approve(1)
    with pytest.raises(RuntimeError, match="writes checkpoints was killed by SIGKILL"):
        behind.wait()


def test_what_cannot_be_sent_to_the_writer_is_told(behind: Store) -> None:
    behind.save(1, tensors(1.0), {"saved": lambda: 1}, metric=None)  # cannot be pickled
    behind.approve(1)
    with pytest.raises(RuntimeError, match="pickle"):
        behind.wait()


def test_the_writer_ends_with_its_rank_and_not_before(behind: Store, tmp_path: Path) -> None:
    process = behind.reserve(tensors(1.0))._process
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        process.send_signal(signum)
    behind.save(1, tensors(1.0), META | {"saved": 1}, metric=None)
    behind.approve(1)
    behind.wait()
    assert process.poll() is None
    behind.close()
    assert process.wait(30) == 0


def _save_beside_collectives(run_dir: Path) -> None:
    checkpoints = open_store(run_dir, asynchronous=True)
    mine = tensors(1.0)
    for step in range(1, 4):
        for group in mine.values():
            for tensor in group.values():
                tensor.fill_(float(step))
        checkpoints.save(step, mine, META | {"saved": step}, metric=None)
        checkpoints.approve(step)
        for i in range(50):
            total = dist.all_reduce_sum_(torch.tensor([float(i)]))
            assert total.item() == i * dist.world_size()
    checkpoints.wait()
    found = checkpoints.find()
    assert found is not None and found.step == 3
    checkpoints.close()


def test_saving_does_not_meet_the_collectives_of_training(
    run_processes: Callable[..., None], tmp_path: Path
) -> None:
    run_processes(3, _save_beside_collectives, tmp_path)


# --- finding ----------------------------------------------------------------------------------


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    assert open_store(tmp_path).find() is None
    (tmp_path / "checkpoints" / "step-5.tmp").mkdir(parents=True)
    assert open_store(tmp_path).find() is None


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _put_step_30_in_place(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step-30"), folder)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit flip": (lambda f: flip_bit(f / "__0_0.distcp", 100), "__0_0.distcp: checksum differs"),
    "truncation": (lambda f: os.truncate(f / "__0_0.distcp", 9), "__0_0.distcp: 9 bytes instead"),
    "missing shard": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: No such file"),
    "missing index": (lambda f: (f / ".metadata").unlink(), ".metadata: No such file"),
    "altered index": (lambda f: flip_bit(f / ".metadata"), ".metadata: checksum differs"),
    "not committed": (lambda f: (f / COMMITTED).unlink(), "COMMITTED is missing"),
    "torn manifest": (lambda f: os.truncate(f / MANIFEST, 30), "manifest.json: checksum differs"),
    "empty folder": (_empty, "COMMITTED is missing"),
    "renamed": (_put_step_30_in_place, "holds step 30"),
}


@pytest.mark.parametrize("damage, reason", DAMAGES.values(), ids=DAMAGES)
def test_fallback_is_named(tmp_path: Path, damage: Callable[[Path], Any], reason: str) -> None:
    saved(tmp_path, 30, 40)
    damage(tmp_path / "checkpoints" / "step-40")
    found = open_store(tmp_path).find()
    assert found is not None and found.step == 30
    (note,) = found.notes
    assert note.startswith("step-40: ") and note.endswith("; falling back to step-30")
    assert reason in note
    assert found_step(tmp_path) == 30


def test_all_damaged_is_not_taken_for_a_new_run(tmp_path: Path) -> None:
    saved(tmp_path, 30, 40)
    for step in (30, 40):
        (tmp_path / "checkpoints" / f"step-{step}" / "__0_0.distcp").unlink()
    with pytest.raises(UserError) as caught:
        open_store(tmp_path).find()
    message = str(caught.value)
    assert "every checkpoint of the run is damaged" in message
    assert "step-30: shard __0_0.distcp" in message and "step-40: shard" in message


@pytest.mark.parametrize(
    "inside, step",
    [("", 40), ("checkpoints", 40), ("checkpoints/step-30", 30), ("checkpoints/step-40", 40)],
)
def test_where_may_be_any_of_three_folders(tmp_path: Path, inside: str, step: int) -> None:
    saved(tmp_path / "other", 30, 40)
    found = find_checkpoint(tmp_path / "other" / inside)
    assert found.step == step and found.meta["saved"] == step


@pytest.mark.parametrize(
    "where, reason",
    [
        pytest.param("absent", "no such folder", id="absent"),
        pytest.param(".", "no step-N folder is there", id="empty"),
        pytest.param("run/checkpoints/step-30/.metadata", "no such folder", id="a file"),
        pytest.param("run/checkpoints/step-30", "step-30: COMMITTED is missing", id="damaged"),
        pytest.param("run", "step-30: COMMITTED is missing", id="run of damaged ones"),
    ],
)
def test_where_without_a_checkpoint(tmp_path: Path, where: str, reason: str) -> None:
    saved(tmp_path / "run", 30)
    (tmp_path / "run" / "checkpoints" / "step-30" / COMMITTED).unlink()
    with pytest.raises(UserError) as caught:
        find_checkpoint(tmp_path / where)
    assert str(tmp_path / where) in str(caught.value) and reason in str(caught.value)


def test_a_relative_step_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 30)
    monkeypatch.chdir(tmp_path / "checkpoints" / "step-30")
    assert find_checkpoint(Path(".")).step == 30


# --- interruptions ----------------------------------------------------------------------------


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(name: str, when: Callable[..., bool] = lambda *_: True) -> Callable[[], None]:
    """Patch a function so that the process is killed where it would run."""

    def patch() -> None:
        module, attribute = name.split(".")
        owner: Any = {"shards": shards, "saver": saver, "manifest": manifest, "Path": Path}[module]
        real = getattr(owner, attribute)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return _die() if when(*args) else real(*args, **kwargs)

        setattr(owner, attribute, replacement)

    return patch


CRASHES: dict[str, tuple[Callable[[], None], int]] = {
    "before the shards": (_die_at("shards.write"), 2),
    "amid the shards": (_die_at("shards._ReportingFileSystem"), 2),
    "after the shards": (_die_at("saver.describe"), 2),
    "before the manifest": (_die_at("manifest.atomic_write"), 2),
    "before the mark": (
        _die_at("manifest.atomic_write", lambda path, _: path.name == COMMITTED),
        2,
    ),
    "before the rename": (_die_at("Path.rename", lambda path, _: path.name == "step-3.tmp"), 3),
    "after the rename": (
        _die_at("saver.sync_folder", lambda path: (path / "step-3").exists()),
        3,
    ),
    "amid a deletion": (_die_at("manifest.sync_folder", lambda path: path.name == "step-1"), 3),
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("patch, survivor", CRASHES.values(), ids=CRASHES)
def test_killed_while_saving(tmp_path: Path, patch: Callable[[], None], survivor: int) -> None:
    saved(tmp_path, 1, 2)

    def doomed() -> None:
        patch()
        saved(tmp_path, 3)

    process = multiprocessing.get_context("fork").Process(target=doomed)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert found_step(tmp_path) == survivor
    # Leftovers are gone after the next save.
    saved(tmp_path, survivor + 1)
    assert names(tmp_path) == {f"step-{survivor}", f"step-{survivor + 1}"}
    assert found_step(tmp_path) == survivor + 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "patch",
    [
        _die_at("Path.rename", lambda path, _: path.name == "step-1.tmp"),
        _die_at("manifest.sync_folder", lambda path: path.name == "step-1"),
    ],
    ids=["after the removal", "amid the removal"],
)
def test_killed_while_the_only_one_gets_its_metric(
    tmp_path: Path, patch: Callable[[], None]
) -> None:
    saved(tmp_path, 1)

    def doomed() -> None:
        patch()
        open_store(tmp_path).save(1, tensors(1.0), META | {"saved": 1}, metric=50.0)

    process = multiprocessing.get_context("fork").Process(target=doomed)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert found_step(tmp_path) == 1
    found = open_store(tmp_path).find()
    assert found is not None and read_manifest(found.path).metric == 50.0


def test_forgetting(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, keep_last=9)
    store.forget(2)
    assert names(tmp_path) == {"step-1"}


# --- full disks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limit", [pytest.param(0, id="from the first byte"), pytest.param(9000, id="amid a shard")]
)
def test_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, limit: int) -> None:
    checkpoints = saved(tmp_path, 1)
    with file_size_limit(limit), pytest.raises(UserError) as caught:
        checkpoints.save(2, tensors(2.0, size=5000), META, metric=None)
    assert str(caught.value).startswith("disk full while saving step 2: ")
    assert "the previous checkpoint step-1 is intact" in str(caught.value)
    assert names(tmp_path) == {"step-1"}
    assert found_step(tmp_path) == 1


@pytest.mark.parametrize("name", ["describe", "commit"])
def test_refusals_after_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error", "somewhere")

    monkeypatch.setattr(saver, name, refuse)
    with pytest.raises(
        UserError, match=r"the file system failed while saving step 1.*there is no other"
    ):
        saved(tmp_path, 1)
    assert names(tmp_path) == set()


def test_an_unwritable_run_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match="while saving step 1"):
        saved(tmp_path, 1)


def _save_on_a_full_disk(run_dir: Path) -> None:
    checkpoints = saved(run_dir, 1)
    big = {"model": {f"w{i}": torch.full((5000,), float(i)) for i in range(4)}}
    rank, world = dist.rank(), dist.world_size()
    with file_size_limit(9000 if rank == world - 1 else 10**9):
        try:
            checkpoints.save(2, big, META, metric=None)
            raise AssertionError("saved on a full disk")
        except UserError as exc:
            assert "disk full while saving step 2" in str(exc)
            assert "step-1 is intact" in str(exc)
            messages = dist.gather_objects(str(exc))
    assert len(set(messages)) == 1
    assert names(run_dir) == {"step-1"}
    # Room was made: the same processes go on.
    checkpoints.save(2, big, META, metric=None)
    found = checkpoints.find()
    assert found is not None and found.step == 2
    assert {f"__{r}_0.distcp" for r in range(world)} < set(found.files)
    target = {"model": {f"w{i}": torch.zeros(5000) for i in range(4)}}
    checkpoints.load(found, target)
    assert all(target["model"][f"w{i}"].eq(i).all() for i in range(4))


def test_full_disk_of_one_rank(run_processes: Callable[..., None], tmp_path: Path) -> None:
    run_processes(2, _save_on_a_full_disk, tmp_path)


def _find_with_damage(run_dir: Path) -> None:
    saved(run_dir, 30, 40)
    dist.on_main(lambda: flip_bit(run_dir / "checkpoints" / "step-40" / "__1_0.distcp"))
    checkpoints = open_store(run_dir)
    found = checkpoints.find()
    assert isinstance(found, Found)
    assert dist.gather_objects(found) == [found] * dist.world_size()
    assert found.notes == ["step-40: shard __1_0.distcp: checksum differs; falling back to step-30"]
    try:
        find_checkpoint(run_dir / "absent")
        raise AssertionError("found nothing")
    except UserError as exc:
        assert "no such folder" in str(exc)


def test_all_ranks_find_the_same(run_processes: Callable[..., None], tmp_path: Path) -> None:
    run_processes(2, _find_with_damage, tmp_path)
