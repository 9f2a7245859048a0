"""Restoring versions of a small repository: two commits, real Git, real DVC, nothing trained."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.launch.folder import run_lock
from lockstep.versions import outputs, rollback, swap
from lockstep.versions.history import CARD, difference, versions
from lockstep.versions.repository import Repository
from lockstep.versions.rollback import Done, opened, roll_back, undo
from scripts import rollback as door
from tests.conftest import clean_environment

pytest.importorskip("dvc", reason="pip install -e '.[dvc]'")

PIPELINE = """\
stages:
  train:
    cmd: >-
      mkdir -p build/packed && cp data/train/0/a.png build/packed/a.png &&
      cp data/train/0/a.png checkpoints/model.safetensors
    deps: [data]
    outs: [build/packed, checkpoints/model.safetensors]
"""
AUTHOR = {
    f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}
V1 = {
    "data/train/0/a.png": "a1", "data/train/0/b.png": "b", "data/train/1/c.png": "c",
    "code.py": "1", "checkpoints/model.safetensors": "a1", "build/packed/a.png": "a1",
}  # fmt: skip
V2 = {
    "data/train/0/a.png": "a2", "data/train/1/c.png": "c", "data/train/1/d.png": "d",
    "code.py": "2", "new.py": "", "checkpoints/model.safetensors": "a2",
    "build/packed/a.png": "a2",
}  # fmt: skip


def run(root: Path, *words: str) -> str:
    """Run git or dvc there; returns what it printed."""
    command = [sys.executable, "-m", *words] if words[0] == "dvc" else list(words)
    env = clean_environment(**AUTHOR)
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def holds(root: Path, version: dict[str, str], *places: str) -> bool:
    """Whether exactly the files of a version lie there."""
    found = {
        path.relative_to(root).as_posix(): path.read_text()
        for place in places
        for path in ([root / place] if (root / place).is_file() else (root / place).rglob("*"))
        if path.is_file() and path.name not in (".gitignore", "model.json")
    }
    wanted = {name: text for name, text in version.items() if name.startswith(places)}
    return found == wanted


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do not change."""
    root = tmp_path_factory.mktemp("versions") / "origin"
    root.mkdir()
    run(root, "git", "init", "-q", "-b", "main")
    run(root, "dvc", "init", "-q")
    run(root, "dvc", "config", "core.analytics", "false")
    write(root, {"dvc.yaml": PIPELINE, ".gitignore": "/runs/\n/build/\n"})
    for name, files in (("v1", V1), ("v2", V2)):
        shutil.rmtree(root / "data", ignore_errors=True)
        write(root, {k: v for k, v in files.items() if not k.startswith(("build", "checkp"))})
        run(root, "dvc", "add", "-q", "data")
        top1 = {"v1": 90.0, "v2": 70.0}[name]
        recipe = {"seed": 0, "optimizer": {"lr": {"v1": 0.1, "v2": 0.2}[name]}}
        card = {"recipe": recipe, "metrics": {"top1": top1, "run": f"runs/{name}"}}
        write(root, {CARD: json.dumps(card | {"weights": {"size": 2_000_000}})})
        (root / "build").mkdir(exist_ok=True)
        run(root, "dvc", "repro", "-q")
        run(root, "git", "add", "-A")
        run(root, "git", "commit", "-qm", f"{name}: trained")
        run(root, "git", "tag", name)
    return root


@pytest.fixture
def root(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to be changed; HEAD and the working tree are v2."""
    to = tmp_path / "repository"
    shutil.copytree(origin, to, symlinks=True)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    return to


def stopped(*_: object) -> None:
    raise KeyboardInterrupt


def to(root: Path, revision: str, *parts: str) -> Done:
    with opened(root) as repository:
        return roll_back(repository, revision, parts)


def back(root: Path) -> Done:
    with opened(root) as repository:
        return undo(repository)


@pytest.mark.parametrize(
    ("parts", "restored", "left"),
    [
        pytest.param(["data"], ["data"], ["code.py", "checkpoints", "build"], id="data"),
        pytest.param(["checkpoints"], ["checkpoints", "build"], ["data", "code.py"], id="weights"),
        pytest.param(["all"], ["data", "checkpoints", "build", "code.py"], [], id="all"),
    ],
)
def test_a_part_and_back(
    root: Path, parts: list[str], restored: list[str], left: list[str]
) -> None:
    head = run(root, "git", "rev-parse", "HEAD")
    done = to(root, "v1", *parts)
    assert holds(root, V1, *restored) and holds(root, V2, *left) and not done.absent
    assert (root / "new.py").exists() == ("all" not in parts)
    assert run(root, "git", "rev-parse", "HEAD") == head
    assert run(root, "git", "diff", "--name-only") == "", "all of it is staged"
    staged = run(root, "git", "diff", "--name-only", "--cached", "v1")
    assert (staged == "") == ("all" in parts)
    assert to(root, "v1", *parts) == Done([], [], [])
    back(root)
    assert holds(root, V2, "data", "checkpoints", "build", "code.py", "new.py")
    assert run(root, "git", "status", "--porcelain") == ""


def test_dvc_agrees_and_an_undo_is_undone(root: Path) -> None:
    to(root, "v1", "all")
    assert json.loads(run(root, "dvc", "status", "--json")) == {}
    back(root)
    back(root)
    assert holds(root, V1, "data", "checkpoints", "code.py")
    with opened(root) as repository:
        assert outputs.unsaved(repository) == (set(), set())


def edit(name: str, text: str = "mine") -> Callable[[Path], None]:
    return lambda root: write(root, {name: text})


def stage(root: Path) -> None:
    write(root, {"code.py": "mine"})
    run(root, "git", "add", "code.py")


def record(root: Path) -> None:
    write(root, {"data/train/0/a.png": "mine"})
    run(root, "dvc", "add", "-q", "data")


def lose_cache(root: Path) -> None:
    shutil.rmtree(root / ".dvc/cache")


def be_busy(root: Path) -> None:
    users = {"x": {"write": {"pid": os.getpid(), "cmd": "dvc repro"}}, "y": {"read": []}}
    write(root, {".dvc/tmp/rwlock": json.dumps(users)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(edit("code.py"), "not committed, and would be lost: code.py", id="edited"),
        pytest.param(stage, "not committed, and would be lost: code.py", id="staged"),
        pytest.param(edit("data/train/0/x.png"), "would be lost: data; record", id="new image"),
        pytest.param(
            lambda root: (root / "data/train/0/a.png").unlink(),
            "would be lost: data; record",
            id="image deleted",
        ),
        pytest.param(record, "not committed, and would be lost: data.dvc", id="dvc add"),
        pytest.param(
            edit("checkpoints/model.safetensors"),
            "would be lost: checkpoints/model.safetensors; record",
            id="other weights",
        ),
        pytest.param(lose_cache, "not in DVC's cache, and could not be brought back", id="cache"),
        pytest.param(be_busy, r"DVC is at work here \(process \d+: dvc repro\)", id="busy"),
    ],
)
def test_refuses_to_lose(root: Path, change: Callable[[Path], None], message: str) -> None:
    change(root)
    before = run(root, "git", "status", "--porcelain")
    kept = (root / "code.py").read_text(), (root / "data/train/1/d.png").read_text()
    with pytest.raises(UserError, match=message):
        to(root, "v1", "all")
    assert run(root, "git", "status", "--porcelain") == before
    assert ((root / "code.py").read_text(), (root / "data/train/1/d.png").read_text()) == kept
    assert not (root / ".dvc/tmp/rollback").exists()


def test_what_is_not_touched_may_be_uncommitted(root: Path) -> None:
    write(root, {"code.py": "mine", "notes.txt": "mine"})
    to(root, "v1", "data")
    assert holds(root, V1, "data") and (root / "code.py").read_text() == "mine"
    back(root)
    assert holds(root, V2, "data") and (root / "notes.txt").read_text() == "mine"


def test_a_commit_keeps_it(root: Path) -> None:
    with pytest.raises(UserError, match="no rollback to undo"):
        back(root)
    to(root, "v1", "all")
    run(root, "git", "commit", "-qam", "Back to v1")
    write(root, {"new.py": "mine"})
    with pytest.raises(UserError, match=r"in the way, and in no version: new\.py"):
        back(root)
    assert (root / "new.py").read_text() == "mine" and holds(root, V1, "data")
    (root / "new.py").unlink()
    back(root)
    assert holds(root, V2, "data", "checkpoints", "code.py"), "undone after the commit"
    run(root, "git", "commit", "-qam", "And forth")
    write(root, {"code.py": "3"})
    run(root, "git", "commit", "-qam", "Work")
    with pytest.raises(UserError, match=r"changed: code\.py; .*rollback\.py to [0-9a-f]{8} --all"):
        back(root)


def test_refuses_beside_a_training(root: Path) -> None:
    run_dir = root / "runs/one"
    write(root, {"runs/one/config.yaml": ""})
    with run_lock(run_dir), pytest.raises(UserError, match=r"run folder .*one is in use by"):
        to(root, "v1", "data")
    assert holds(root, V2, "data")
    to(root, "v1", "data")


@pytest.mark.parametrize("revision", ["v3", "HEAD~9", "--all", ""])
def test_no_such_revision(root: Path, revision: str) -> None:
    with pytest.raises(UserError, match="no such revision"):
        to(root, revision, "all")


def test_no_repository(tmp_path: Path, root: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="not a git repository"), opened(tmp_path / "empty"):
        pass
    run(tmp_path / "empty", "git", "init", "-q")
    with pytest.raises(UserError, match="dvc init"), opened(tmp_path / "empty"):
        pass


def test_restores_what_was_deleted_by_accident(root: Path) -> None:
    shutil.rmtree(root / "data")
    shutil.rmtree(root / "checkpoints")
    to(root, "HEAD", "data", "checkpoints")
    assert holds(root, V2, "data", "checkpoints") and (root / CARD).exists()
    assert run(root, "git", "status", "--porcelain") == ""


def test_fetches_from_the_remote(root: Path) -> None:
    run(root, "dvc", "remote", "add", "-d", "--local", "store", str(root.parent / "store"))
    run(root, "dvc", "push", "-q", "--all-commits")
    shutil.rmtree(root / ".dvc/cache")
    shutil.rmtree(root / "data")
    shutil.rmtree(root / "build")
    (root / "checkpoints/model.safetensors").unlink()
    outputs._files.cache_clear()
    to(root, "v1", "all")
    assert holds(root, V1, "data", "checkpoints", "build")


def test_absent_everywhere(root: Path) -> None:
    """Data and weights are wanted; what else the pipeline made, it makes again."""
    packed = outputs.outputs(Repository(root), "v1")["build/packed"].entry["md5"]
    cache = root / ".dvc/cache/files/md5"
    (cache / packed[:2] / packed[2:]).unlink()
    outputs._files.cache_clear()
    done = to(root, "v1", "checkpoints")
    assert done.absent == ["build/packed"] and not (root / "build/packed").exists()
    data = outputs.outputs(Repository(root), "v1")["data"].entry["md5"]
    (cache / data[:2] / data[2:]).unlink()
    outputs._files.cache_clear()
    with pytest.raises(
        UserError, match=r"data of .* neither in DVC's cache nor in the default remote"
    ):
        to(root, "v1", "data")
    assert holds(root, V2, "data")


def test_a_damaged_cache_is_noticed(root: Path) -> None:
    (damaged,) = [
        p for p in (root / ".dvc/cache").rglob("*") if p.is_file() and p.read_text() == "a1"
    ]
    damaged.chmod(0o600)
    damaged.write_text("A1")
    with pytest.raises(UserError, match=r"a\.png: DVC's copy of .* is damaged; remove"):
        to(root, "v1", "data")
    assert holds(root, V2, "data")


@pytest.mark.parametrize(
    ("owner", "name", "survived", "version"),
    [
        pytest.param("rollback", "copy", 1, V2, id="while copying"),
        pytest.param("os", "rename", 6, V1, id="while moving"),
    ],
)
def test_killed(root: Path, owner: str, name: str, survived: int, version: dict[str, str]) -> None:
    """Really killed: all old, or all new after the next command."""
    script = f"""
import os, signal
from pathlib import Path
from lockstep.versions import rollback
with rollback.opened(Path({str(root)!r})) as repository:
    really, left = {owner}.{name}, [{survived}]
    def dies(*args, **kwargs):
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return really(*args, **kwargs)
    {owner}.{name} = dies
    rollback.roll_back(repository, "v1", ["all"])
"""
    killed = subprocess.run([sys.executable, "-c", script], env=clean_environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (swap.pending(Repository(root).state) is not None) == (version is V1)
    with opened(root):
        assert holds(root, version, "data", "checkpoints", "build", "code.py")
    to(root, "v2", "all")
    assert holds(root, V2, "data", "checkpoints", "build", "code.py")
    assert run(root, "git", "status", "--porcelain") == ""


def test_the_door(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root / "data")
    assert door.main(["to", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: nowhere: no such revision")
    assert door.main(["to", "HEAD"]) == 0
    assert capsys.readouterr().out == "nothing to do: it is all there\n"
    assert door.main(["list", "-n", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-4:] == ["2.0", "v2", "v2:", "trained"]
    assert door.main(["diff", "v1"]) == 0
    assert "  data/train/0: 1 removed, 1 changed\n" in capsys.readouterr().out
    monkeypatch.setattr(door, "roll_back", stopped)
    assert door.main(["to", "v1"]) == 85


@pytest.mark.parametrize(
    ("words", "weights", "data"),
    [
        pytest.param("verify", "checkpoints/model.safetensors", None, id="the repository's"),
        pytest.param("verify x.json --data ..", "data/train/x.json", "data", id="typed"),
    ],
)
def test_verify_in_any_folder(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    weights: str,
    data: str | None,
) -> None:
    def seen(found: Path, *, data: Path | None, device: str) -> None:
        raise UserError(f"{found.resolve()} {data and data.resolve()} {Path.cwd()}")

    monkeypatch.chdir(root / "data/train")
    monkeypatch.setattr("lockstep.versions.verify.verify", seen)
    assert door.main(words.split()) == 2
    told = f"error: {root / weights} {data and root / data} {root}\n"
    assert capsys.readouterr().err == told


def test_two_at_once(root: Path) -> None:
    with opened(root), pytest.raises(UserError, match="another rollback is at work"), opened(root):
        pass


def test_versions(root: Path) -> None:
    (second, first) = versions(Repository(root), 10)
    assert [v.subject for v in (first, second)] == ["v1: trained", "v2: trained"]
    assert (second.is_here, first.is_here) == (True, False)
    assert first.card is not None and first.card["metrics"]["top1"] == 90.0
    (data,) = first.data
    assert (data.path, data.entry["nfiles"]) == ("data", 3)
    to(root, "v1", "data", "checkpoints")
    assert [v.is_here for v in versions(Repository(root), 10)] == [False, True]
    assert len(versions(Repository(root), 1)) == 1


def test_a_commit_of_data_alone_names_no_weights(root: Path) -> None:
    record(root)
    run(root, "git", "commit", "-qam", "Better images")
    newest = versions(Repository(root), 10)[0]
    assert (newest.subject, newest.card) == ("Better images", None)


def test_difference(root: Path) -> None:
    with opened(root) as repository:
        found = difference(repository, repository.commit("v1"), repository.commit("v2"))
    zero, one = found.folders["data/train/0"], found.folders["data/train/1"]
    assert (zero.added, zero.removed, zero.changed) == (
        [], ["data/train/0/b.png"], ["data/train/0/a.png"]
    )  # fmt: skip
    assert (one.added, one.removed, one.changed) == (["data/train/1/d.png"], [], [])
    assert found.cards["recipe"] == {"optimizer.lr": (0.1, 0.2)}
    assert found.cards["metrics"]["top1"] == (90.0, 70.0)
    with opened(root) as repository:
        same = difference(repository, repository.commit("v2"), repository.commit("HEAD"))
    assert same.folders == {} and not any(same.cards.values())


def test_ctrl_c_while_copying_changes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback, "copy", stopped)
    with pytest.raises(KeyboardInterrupt):
        to(root, "v1", "all")
    assert holds(root, V2, "data", "code.py") and not Repository(root).state.exists()
