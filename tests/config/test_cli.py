from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lockstep.config.cli import HYDRA, explain, groups, help_text, quoted, read_command, wants_help
from lockstep.errors import UserError
from tests.conftest import REPOSITORY
from tests.runs import configure

CONF = REPOSITORY / "conf"


def test_help_lists_what_lies_in_conf() -> None:
    text = help_text(CONF)
    words = " ".join(text.split())
    for group, options in groups(CONF):
        assert f" {group} {', '.join(options)} " in words
    assert "_base" not in text
    assert {g for g, _ in groups(CONF)} >= {"model", "strategy", "precision", "data", "experiment"}
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("argv", "overrides"),
    [
        (["seed=1", "--multirun", "model=vit"], ["seed=1", "model=vit"]),
        (["model.kwargs.depth=6"], ["++model.kwargs.depth=6"]),
        (["model.kwargs={depth: 6}"], ["++model.kwargs={depth: 6}"]),
        (["nccl.env.NCCL_DEBUG=INFO"], ["++nccl.env.NCCL_DEBUG=INFO"]),
        (["+optimizer.kwargs.eps=1"], ["+optimizer.kwargs.eps=1"]),
        (["~optimizer.kwargs.betas"], ["~optimizer.kwargs.betas"]),
        (["model.kwargsx=1", "optimizer.lr=1"], ["model.kwargsx=1", "optimizer.lr=1"]),
    ],
)
def test_overrides(argv: list[str], overrides: list[str]) -> None:
    command = read_command(argv)
    assert command.overrides == overrides
    assert command.multirun is ("--multirun" in argv)
    assert command.argv[-len(overrides) :] == overrides


def test_flags_survive_and_paths_are_those_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/x").mkdir(parents=True)
    command = read_command(["-cp", "runs/x", "a=1", "--config-name=config", "--cfg", "job"])
    assert command.argv == [
        "--cfg", "job", "--config-path", str(tmp_path / "runs/x"), "--config-name", "config",
        *HYDRA, "a=1",
    ]  # fmt: skip


def test_the_shells_question_passes_unchanged() -> None:
    assert read_command(["-sc", "query=bash"]).argv == ["--shell-completion", "query=bash"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mulitrun"], "unknown flag --mulitrun; did you mean --multirun?"),
        (["--steps", "20"], "unknown flag --steps; a key has no dashes: steps=VALUE"),
        (["--cfg"], "expected one argument"),
        (["--cfg", "jobb"], "invalid choice: 'jobb'"),
        (["-z"], "unrecognized arguments: -z"),
    ],
)
def test_flag_mistakes(argv: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_command(argv)
    assert message in str(caught.value)


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "multirun.yaml")
    told = "multirun.yaml cannot be written: No space left on device: make room"
    assert str(explain(full, tmp_path)).startswith(told)
    assert explain(OSError(errno.EIO, "Input/output error"), tmp_path) is None


def test_help_is_asked_for_by_either_name() -> None:
    assert wants_help(["seed=1", "-h"]) and wants_help(["--help"]) and not wants_help(["help=1"])


def test_swept_overrides_are_those_that_vary() -> None:
    command = read_command(["-m", "strategy=single,ddp", "plan=true", "model.kwargs.depth=1,2"])
    job = ["strategy=ddp", "plan=True", "++model.kwargs.depth=2"]
    assert command.swept(job) == ["strategy=ddp", "++model.kwargs.depth=2"]
    assert command.swept(["from_the_sweeper=1"]) == ["from_the_sweeper=1"]


@pytest.mark.parametrize(
    "name",
    [
        "a/b-1.0+c_2",
        "",
        "it's a, b=c",
        "${model.name}",
        "a\\",
        "a\\'b",
        "[1]",
        "null",
        ".5",
        "../x",
        "1e3",
        "über",
    ],
)
def test_quoted_is_read_as_it_was_written(name: str) -> None:
    value = quoted(name)
    assert configure("data=folder", f"data.root={value}").data.root == name
