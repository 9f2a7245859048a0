"""``train.py`` from the outside: every mistake is one message, and its exit code says which kind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import train as door
from lockstep.errors import EXIT_OK, EXIT_USER_ERROR
from tests.conftest import REPOSITORY, clean_environment

Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``cli(*argv)``: the door in this process; exit code, stdout, stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *argv])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        code = door.main(list(argv))
        return code, *capsys.readouterr()

    return run


MISTAKES = {
    "unknown key": (["optimizer.lrr=1"], "optimizer.lrr: unknown key or group; did you mean optimizer.lr?"),
    "unknown top-level key": (["stpes=3"], "stpes: unknown key or group; did you mean steps?"),
    "unknown group": (["modle=vit"], "modle: unknown key or group; did you mean model?"),
    "unknown option": (["model=vitt"], "model = vitt: no such option; did you mean vit?; options: resnet18,"),
    "unknown option of a sweep": (["-m", "strategy=single,dpp", "run.root=/nonexistent"], "strategy = dpp: no such option"),
    "an option of an experiment": (["experiment=digit"], "did you mean digits?"),
    "several options of a group": (["strategy=[ddp,fsdp]"], "strategy=[ddp,fsdp]: a group has one option; several need a sweep: python train.py -m strategy=ddp,fsdp"),
    "a key like no other": (["zzzqqq=1"], "zzzqqq: unknown key or group; python train.py --help lists them"),
    "several values, no sweep": (["seed=1,2"], "python train.py -m seed=1,2"),
    "open bracket": (["augment.scale=[1"], "augment.scale=[1: cannot be read as KEY=VALUE"),
    "no value": (["seed"], "seed: cannot be read as KEY=VALUE"),
    "no key": (["=3"], "command line: "),
    "null for a group": (["optimizer=null"], "command line: a group that is null"),
    "delete nothing": (["~foo"], "Could not delete"),
    "missing model name": (["model=timm"], "model.name has no value: set model.name=..."),
    "missing data root": (["data=folder"], "data.root has no value: set data.root=..."),
    "interpolation": (["data.root=${nope}"], "data.root: Interpolation key 'nope' not found"),
    "negative batch": (["batch.global=-1"], "batch.global = -1: should be greater than 0"),
    "wrong type": (["epochs=many"], "epochs = many: should be a valid integer"),
    "unknown flag": (["--mulitrun"], "unknown flag --mulitrun; did you mean --multirun?"),
    "no such folder": (["--config-path", "nowhere"], "Primary config directory not found"),
    "no such file": (["--config-name", "nothing"], "Cannot find primary config 'nothing'"),
    "name outside the root": (["run.name=../x"], "run.name = ../x: must be a folder name"),
    "a sweep's own key": (["-m", "seed=1,2", "sweep.jobs=-1", "sweep.prune=2", "run.root=/nonexistent"], "sweep.prune = 2: should be"),
    "a key of all jobs": (["-m", "seed=1,2", "epochs=many", "run.root=/nonexistent"], "epochs = many: should be a valid integer"),
    "a sweep of nothing": (["-m", "seed=range(0)", "run.root=/nonexistent"], "has no values, so it has no jobs"),
    "plans of a sweep": (["-m", "seed=1,2", "plan=true", "run.root=/nonexistent"], "a sweep prints no plans"),
    "a seed that numpy rounds": ([f"seed={1 << 63}"], f"seed = {1 << 63}: at most"),
    "no time to start": (["launch.timeout_seconds=0.001"], "launch.timeout_seconds = 0.001: at least 1"),
    "resume from nothing": (["resume="], "resume = : must be auto, never, or the folder"),
    "a sweep's bad job": (["-m", "seed=-1,-2", "run.root=/nonexistent"], "seed = -1: should be"),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(
    cli: Callable[..., tuple[int, str, str]], argv: list[str], message: str, tmp_path: Path
) -> None:
    argv = [a.replace("/nonexistent", str(tmp_path)) for a in argv]
    code, _, err = cli(*argv)
    assert code == EXIT_USER_ERROR
    assert message in err
    assert err.count("error: ") == (2 if "seed=-1,-2" in argv else 1)  # one a job
    assert "Traceback" not in err and "Error executing job" not in err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optimizer.name=adamww", "did you mean adamw"),
        ("optimizer.kwargs.foo=1", "optimizer.kwargs.foo = 1: adamw has no such argument: leave"),
        ("optimizer.kwargs.lr=1", "optimizer.kwargs.lr = 1: use optimizer.lr"),
        ("model.kwargs.num_classes=7", "model.kwargs.num_classes = 7: the data set has its own"),
        ("model.kwargs.img_size=64", "model.kwargs.img_size = 64: use model.image_size"),
        ("optimizer.kwargs.betas=abc", "optimizer.name = adamw with {'betas': 'abc'}"),
        ("model.kwargs.foo=1", "model.kwargs.foo = 1: vit_tiny_patch16_224 has no such argument"),
    ],
)
def test_what_cannot_be_built_leaves_no_folder(
    cli: Callable[..., tuple[int, str, str]],
    few_digits: Path,
    tmp_path: Path,
    word: str,
    message: str,
) -> None:
    root = [f"data.root={few_digits}", f"run.root={tmp_path / 'runs'}"]
    sizes = ["data.num_classes=null", "data.num_train=null", "data.num_val=null"]
    code, _, err = cli("data=digits", "model=vit_tiny", *root, *sizes, word)
    assert code == EXIT_USER_ERROR and message in err and err.count("error: ") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--help"], "groups (files below conf/):"),
        (["--cfg", "job", "strategy=fsdp"], "shard: full"),
        (["strategy=fsdp", "--cfg", "job", "-p", "strategy"], "shard: full"),
        (["--cfg", "job", "model.kwargs.depth=3"], "depth: 3"),
        (["--cfg", "job", "model.kwargs={depth: 3}"], "depth: 3"),
    ],
)
def test_what_only_prints(
    cli: Callable[..., tuple[int, str, str]], argv: list[str], shown: str
) -> None:
    code, out, err = cli(*argv)
    assert (code, err) == (EXIT_OK, "")
    assert shown in out


def test_help_explains_the_keys_that_the_readme_promises(
    cli: Callable[..., tuple[int, str, str]],
) -> None:
    told = (
        (REPOSITORY / "README.md")
        .read_text()
        .partition("\nTop level: ")[2]
        .partition("\n`python")[0]
    )
    promised = {word.partition("=")[0] for word in re.findall("`([^`]+)`", told)}
    assert len(promised) > 10
    lines = cli("--help")[1].splitlines()
    explained = {line.split()[0] for line in lines if re.match(r"  \S+  +\S+ ", line)}
    assert promised <= explained
    assert max(map(len, lines)) <= 100


def test_shell_completion(
    cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "python train.py strategy="
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    code, out, _ = cli("-sc", "query=bash")
    assert code == EXIT_OK and "strategy=fsdp" in out.split()


@pytest.mark.parametrize("argv", [["--help"], ["--cfg", "job"]], ids=["help", "cfg"])
def test_help_and_cfg_import_no_torch(argv: list[str]) -> None:
    code = f"import sys; sys.argv[1:] = {argv!r}; import train; train.main(sys.argv[1:])"
    code += "; heavy = {'torch', 'timm', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, REPOSITORY / "train.py"],
        env=clean_environment() | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY / 'src'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=50)[0] == "" and process.returncode == -signal.SIGINT


def test_plan_and_its_refusals(train: Train, tmp_path: Path) -> None:
    shown = train("plan=true", "batch.global=96", "device=cpu")
    assert shown.returncode == 0, shown.stderr
    assert "global batch   96" in shown.stdout
    refused = train("plan=true", "strategy=single", "launch.processes=4", "device=cpu")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: strategy = single is one process")
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_run_its_repetition_and_a_sweep(train: Train, tmp_path: Path) -> None:
    small = (
        "experiment=digits", "model.kwargs={depth: 1, embed_dim: 24, num_heads: 3}",
        "steps=2", "batch.global=16", "device=cpu", f"data.root={tmp_path}/digits",
    )  # fmt: skip
    made = subprocess.run(
        [sys.executable, "scripts/prepare_data.py", "digits", "--root", str(tmp_path)],
        cwd=REPOSITORY,
        env=clean_environment(),
        check=False,
    )
    assert made.returncode == 0
    first = train(*small)
    assert first.returncode == 0, first.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    names = {p.name for p in run_dir.iterdir()}
    assert {"config.yaml", "plan.json", "metrics.jsonl", "DONE", "checkpoints"} <= names

    again = train("--config-path", str(run_dir), "--config-name", "config")
    assert again.returncode == 0 and "already finished" in again.stderr

    sweep = train("-m", *small, "seed=1,2", "launch.processes=1,99", "strategy=single")
    assert sweep.returncode == 2, sweep.stderr
    lines = sweep.stderr.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["top1", "state"])
    table = lines[head + 1 : head + 5]
    assert [line.split()[1:3] for line in table] == [["done", "0"]] * 2 + [["failed", "2"]] * 2
    assert len({line.split()[-1] for line in table}) == 4
    done = [p.parent.name for p in (tmp_path / "runs").glob("*seed.*/DONE")]
    assert len(done) == 2
