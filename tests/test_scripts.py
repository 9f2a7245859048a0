"""The doors in scripts/: what they print and return."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import train as train_py
from lockstep.config.bind import load_config
from lockstep.launch import launch
from lockstep.launch.folder import run_lock
from scripts import checkpoint, compare_runs, evaluate, export, prepare_data, resolve_config
from tests.runs import configure

SMALL = (
    "device=cpu", "data.num_classes=null", "batch.global=16", "batch.micro=8", "steps=4",
    "++model.kwargs={depth: 1, embed_dim: 24, num_heads: 2}",
)  # fmt: skip


def trained(root: Path, data: Path, name: str, *overrides: str) -> int:
    """Train here; returns the exit code."""
    here = (f"data.root={data}", f"run.root={root}", "strategy=single")
    return launch(configure(*SMALL, *here, *overrides), name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, few_digits: Path) -> dict[str, Path]:
    """Finished runs. Do not change."""
    root = tmp_path_factory.mktemp("runs")
    made = {"single": (), "seed": ("seed=1",), "ddp": ("strategy=ddp", "launch.processes=2")}
    for name, overrides in made.items():
        assert trained(root, few_digits, name, *overrides) == 0
    return {name: root / name for name in made}


def top1(run: Path) -> float:
    return float(json.loads((run / "DONE").read_text())["top1"])


def test_evaluate(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs["ddp"]
    for where in (run, run / "checkpoints/step-4", run / "model.safetensors"):
        to = tmp_path / "new/figures.json"
        assert evaluate.main([str(where), "--device", "cpu", "--json", str(to)]) == 0
        told = json.loads(to.read_text())
        assert told["top1"] == top1(run)
        assert (told["count"], told["step"], told["weights"]) == (23, 4, "raw")
        assert capsys.readouterr().out.startswith(f"top-1 {top1(run):.2f} %  top-5 ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["gone"], "error: gone: no such folder", id="nowhere"),
        pytest.param(["{run}", "--weights", "ema"], "error: --weights ema: ", id="no ema"),
        pytest.param(["{run}", "--data", "gone"], "error: data.root = gone: ", id="no images"),
        pytest.param(["{run}", "--json", "{run}/DONE/x"], "error: --json ", id="no place"),
    ],
)
def test_evaluate_refuses(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert evaluate.main([word.format(run=runs["single"]) for word in arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("main", [evaluate.main, export.main, compare_runs.main, checkpoint.main])
def test_usage(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--nope"])
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0


def test_export(
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = runs["single"]
    assert export.main([str(run)]) == 0
    assert capsys.readouterr().out.startswith("model-step-4-raw.safetensors: raw weights of step 4")
    assert evaluate.main(["model-step-4-raw.safetensors", "--json", "figures.json"]) == 0
    assert json.loads(Path("figures.json").read_text())["top1"] == top1(run)
    assert export.main([str(run), "--to", "weights.bin"]) == 2
    assert "must end in .safetensors" in capsys.readouterr().err


def test_compare_runs(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    single, ddp, seed = (str(runs[name]) for name in ("single", "ddp", "seed"))
    assert compare_runs.main([single, ddp]) == 0
    assert capsys.readouterr().out.startswith("same run: 4 steps, ")
    assert compare_runs.main([single, seed]) == 1
    assert "  seed: 0 and 1" in capsys.readouterr().out
    assert compare_runs.main([single, f"{single}-not"]) == 2
    assert "no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare_runs.main([single, ddp, "--tolerance", "-1"])


def test_compare_a_run_with_an_interrupted_one(
    runs: dict[str, Path], few_digits: Path, tmp_path: Path
) -> None:
    pair = [str(runs["single"]), str(tmp_path / "stopped"), "--tolerance", "0"]
    assert trained(tmp_path, few_digits, "stopped", "stop_at=2") == 85
    assert compare_runs.main(pair) == 1
    assert trained(tmp_path, few_digits, "stopped") == 0
    assert compare_runs.main(pair) == 0


def test_a_run_that_met_an_unreadable_image_goes_on_without_it(
    few_digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = shutil.copytree(few_digits, tmp_path / "images")
    assert trained(tmp_path, images, "it", "stop_at=3") == 85
    for path in sorted(images.glob("train/*/*"))[::2]:
        path.write_bytes(bytes(path.stat().st_size))
    capsys.readouterr()
    assert trained(tmp_path, images, "it", "steps=6") == 2
    assert "undo the change" in capsys.readouterr().err
    assert trained(tmp_path, images, "it", "data.cache=off") == 2
    assert "or set data.on_error=skip to go on without such images" in capsys.readouterr().err
    assert trained(tmp_path, images, "it", "data.cache=off", "data.on_error=skip") == 0
    told = capsys.readouterr().out
    assert "resumed from step-3" in told and "images cannot be read and are left out" in told


def test_checkpoint(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: object, code: int = 0) -> list[str]:
        assert checkpoint.main([str(word) for word in words]) == code
        told = capsys.readouterr()
        return (told.err if code == 2 else told.out).splitlines()

    run = tmp_path / "run"
    shutil.copytree(runs["single"], run, symlinks=True)
    older = run / "checkpoints/step-3"
    shutil.rmtree(older)
    torn = run / "checkpoints/step-5.tmp"
    header, *rows = said("list", run)
    assert header.split() == ["step", "top-1", "when", "MB", "state"]
    assert rows[0].split()[:2] == ["4", f"{top1(run):.2f}"] and rows[0].endswith("newest, best")
    assert said("verify", run)[0].startswith("step-4: good, ")

    consolidated = tmp_path / "new/model.safetensors"
    (line,) = said("consolidate", run, consolidated, "--step", 4, "--weights", "raw")
    assert line == f"{consolidated}: raw weights of step 4"
    assert consolidated.read_bytes() == (run / "model.safetensors").read_bytes()
    assert evaluate.main([str(consolidated)]) == 0
    assert f"top-1 {top1(run):.2f} %" in capsys.readouterr().out

    shutil.copytree(run / "checkpoints/step-4", older)  # holds another step than it says
    torn.mkdir()
    assert said("verify", run, code=1)[1].startswith("step-3: damaged: holds step 4, ")
    assert [line.split()[:3] for line in said("prune", run, "--keep-last", 1, "--dry-run")] == [
        ["would", "delete", "step-3"],
        ["would", "delete", "step-5.tmp"],
        ["kept:", "step-4"],
    ]
    with run_lock(run):
        (line,) = said("prune", run, "--keep-last", 1, code=2)
        assert line.startswith(f"error: run folder {run} is in use by process ")
        assert older.exists() and torn.exists()
    assert said("prune", run, "--keep-last", 1)[-1] == "kept: step-4"
    assert [path.name for path in run.glob("checkpoints/step-*")] == ["step-4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param("list gone", "error: gone: no such folder", id="nowhere"),
        pytest.param("prune gone --keep-last 1", "error: gone: no such folder", id="no run"),
        pytest.param("consolidate {run} x.safetensors --step 9", "its steps: 3, 4", id="no step"),
        pytest.param("consolidate {run} x.bin", "x.bin: the file's name must end in", id="name"),
        pytest.param("consolidate {run} x.safetensors --weights ema", "--weights ema", id="ema"),
        pytest.param(
            "prune {run} --keep-last 0", "must be a whole number from 1", id="keep nothing"
        ),
        pytest.param("prune {run}", "--keep-last", id="keep what"),
    ],
)
def test_checkpoint_refuses(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    words = [word.format(run=runs["single"]) for word in arguments.split()]
    try:
        code = checkpoint.main(words)
    except SystemExit as exc:  # of the argument parser
        code = int(exc.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not Path("gone").exists()


def test_check_writes_its_findings(few_digits: Path, tmp_path: Path) -> None:
    to = tmp_path / "new/data.json"
    assert prepare_data.main(["check", str(few_digits), "--json", str(to)]) == 0
    train_split, val = json.loads(to.read_text())
    assert (train_split["split"], sum(train_split["counts"].values())) == ("train", 47)
    assert (val["split"], val["unreadable"]) == ("val", {})


def test_check_shows_its_table_where_classes_differ(
    few_digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(few_digits, tmp_path / "uneven")
    shutil.rmtree(root / "val/2")
    assert prepare_data.main(["check", str(root), "--sheet", str(tmp_path / "sheet.png")]) == 2
    out = capsys.readouterr().out
    assert "smallest class" in out and out.count("missing in val: 2") == 1


def test_pack_ends_with_a_command_that_works(
    few_digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw, out = shutil.copytree(few_digits, tmp_path / "raw"), tmp_path / "it's a, b=c"
    (raw / "val/1/x.png").write_bytes(b"a text")
    assert prepare_data.main(["pack", str(raw), str(out)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    named = "1/x.png (not an image of a known format)"
    assert sum(line.startswith("val: 1 of them") and named in line for line in lines) == 1
    _, *words = shlex.split(last.removeprefix("train with: python "))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert train_py.main([*words, "plan=true", "device=cpu"]) == 0
    assert "47 train, 24 val, 4 classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "function"),
    [
        ("check .", "lockstep.data.check.FolderSource.open"),
        ("pack . out", "lockstep.data.pack.FolderSource.open"),
        ("verify .", "lockstep.data.packed.verify"),
        ("digits --root .", "lockstep.data.digits.digit_files"),
        ("cifar10 --root .", "lockstep.data.download.replace_folder"),
    ],
)
def test_stopped_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: str,
    function: str,
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(function, stop)
    assert prepare_data.main(argv.split()) == 85
    assert capsys.readouterr().err == "stopped: give the same command again\n"
    assert not list(tmp_path.iterdir())


def test_resolve_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = tmp_path / "params.yaml"
    params.write_text("train: {experiment: digits, overrides: [seed=7]}")
    call = ["--params", str(params), "--to", str(tmp_path / "new/config"), str(params)]
    assert resolve_config.main(call) == 0
    config = load_config(tmp_path / "new/config/config.yaml")
    named = f"{config.run.root}/{config.run.name}\n"
    assert config.seed == 7
    assert (tmp_path / "new/config/run").read_text() == capsys.readouterr().out == named
    params.write_text("train: {overrides: [sed=7]}")
    assert resolve_config.main(call) == 2
    assert "did you mean seed?" in capsys.readouterr().err
