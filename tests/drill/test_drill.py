"""The drill: some of its cells as they are, and the parts that need no run."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import drill
from lockstep.data.loader import Batch
from lockstep.drill import Cell, Outcome, Site, all_cells, faults
from lockstep.drill.faults import Saboteur, Script
from lockstep.errors import UserError
from scripts import drill as door
from tests.conftest import REPOSITORY, clean_environment


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - clean_environment().keys():
            patch.delenv(name)
        for name, value in clean_environment().items():
            patch.setenv(name, value)
        return drill.prepare(REPOSITORY / "conf", tmp_path_factory.mktemp("drill"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell, verdict, how",
    [
        (Cell("SIGKILL", 1, "save"), "same run", "restarted"),
        (Cell("SIGSTOP", 1, "step"), "same run", "restarted"),
        (Cell("flipped bit", None, "shard"), "same run", "fell back"),
    ],
    ids=str,
)
def test_cell(
    site: Site, monkeypatch: pytest.MonkeyPatch, cell: Cell, verdict: str, how: str
) -> None:
    for name, value in clean_environment().items():
        monkeypatch.setenv(name, value)
    outcome = drill.run_cell(site, cell)
    assert (outcome.verdict, outcome.how) == (verdict, how), outcome.why
    # Checkpoints are written behind the training: that of step 4 may not be there yet.
    assert re.search(rf"{how} at step [24]$", outcome.why), outcome.why


@pytest.mark.slow
def test_a_node_is_lost_and_comes_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TORCH_DISABLE_SHARE_RDZV_TCP_STORE, the group that forms anew would die."""
    for name, value in clean_environment().items():
        monkeypatch.setenv(name, value)
    outcome = drill.run_cell(site, Cell("rejoin", 1, "step"))
    assert (outcome.verdict, outcome.how) == ("same run", "rejoined"), outcome.why


# --- cells and the table ----------------------------------------------------------------------


def test_all_cells() -> None:
    cells = all_cells()
    assert len(cells) == len(set(map(str, cells))) == len(set(cells))
    assert {cell.fault for cell in cells} == {*faults.FAULTS, *drill.DAMAGE, *drill.NODES}
    for fault in ("SIGKILL", "rejoin"):
        struck = {(cell.rank, cell.place) for cell in cells if cell.fault == fault}
        assert struck == {(rank, place) for rank in (0, 1) for place in faults.PLACES}
    assert all_cells(["NaN"], 0, "save") == [Cell("NaN", 0, "save")]
    assert all_cells(["torn write"], rank=0) == []


def test_table() -> None:
    outcomes = [
        (Cell("NaN", 0, "start"), Outcome("refused", "resumed", "loss is NaN; then resumed"), 9.0),
        (Cell("NaN", 0, "save"), Outcome("refused", "resumed", "loss is NaN; then resumed"), 9.0),
        (Cell("OOM", 1, "step"), Outcome("same run", "restarted", "restarted at step 4"), 9.0),
        (Cell("torn write", None, "shard"), Outcome("LOST", "", "another run"), 9.0),
    ]
    shown = drill.table(outcomes, 41.6).splitlines()
    assert [line.split() for line in shown] == [
        ["start", "step", "evaluate", "save"],
        ["NaN,", "rank", "0", "refused", "[1]", "refused", "[1]"],
        ["OOM,", "rank", "1", "same", "run,", "restarted"],
        [],
        ["shard", "manifest.json", ".metadata", "metrics.jsonl"],
        ["torn", "write", "LOST", "[2]"],
        [],
        ["[1]", "loss", "is", "NaN;", "then", "resumed"],
        ["[2]", "another", "run"],
        ["4", "cells:", "1", "same", "run,", "2", "refused,", "1", "LOST", "(42", "s)"],
    ]
    assert shown[1].index("refused", 30) == shown[0].index("save")


@pytest.mark.parametrize(
    "fault, worlds, num_starts, step, how",
    [
        ("SIGKILL", [2, 2], 1, 4, "restarted"),
        ("SIGTERM", [2, 2], 2, 6, "resumed"),
        ("disk full", [2], 1, 0, "unharmed"),
        ("torn write", [2, 2], 2, 4, "fell back"),
        ("torn write", [2, 2], 2, 6, "resumed"),
        ("lost node", [2, 1], 1, 4, "re-formed"),
        ("rejoin", [2, 1, 2], 1, 5, "rejoined"),
        ("rejoin", [2, 1], 1, 4, "re-formed"),
        ("lost node", [2, 2], 2, 4, "resumed"),
    ],
)
def test_how(fault: str, worlds: list[int], num_starts: int, step: int, how: str) -> None:
    assert drill._how(Cell(fault, 0, "step"), worlds, num_starts, step) == how


@pytest.mark.parametrize("fault", drill.DAMAGE)
@pytest.mark.parametrize("place", drill.FILES)
def test_damage_hits_one_file(tmp_path: Path, fault: str, place: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(bytes(100))
    for step in (2, 10):
        folder = tmp_path / f"checkpoints/step-{step}"
        folder.mkdir(parents=True)
        for name in ("__0_0.distcp", "__1_0.distcp", "manifest.json", ".metadata", "COMMITTED"):
            (folder / name).write_bytes(bytes(100))
    drill._damage(tmp_path, Cell(fault, None, place))
    hit = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    hit = {path: data for path, data in hit.items() if data != bytes(100)}
    (path,) = hit
    assert path.name == {"shard": "__0_0.distcp"}.get(place, place)
    assert path.parent in (tmp_path, tmp_path / "checkpoints/step-10")
    assert len(hit[path]) == (100 if fault == "flipped bit" else 87)


# --- the worker that breaks -------------------------------------------------------------------


def test_a_fault_strikes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[int] = []
    monkeypatch.setitem(faults.FAULTS, "SIGKILL", lambda _: struck.append(1))
    script = Script(str(tmp_path), "SIGKILL", rank=0, place="save", after_step=5)
    Saboteur(replace(script, rank=1)).at("save", 6)
    Saboteur(replace(script, fault=None)).at("save", 6)
    first = Saboteur(script)
    first.at("save")
    first.at("step", 6)
    first.at("save", 4)
    assert not struck
    first.at("save", 6)
    first.at("save", 8)
    Saboteur(script).at("save", 6)  # after a restart
    assert len(struck) == 1


def test_processes_sign_in(tmp_path: Path) -> None:
    script = Script(str(tmp_path), wait_for_port=80)
    assert Script.read(script.environment()) == script
    assert script.read_starts() == []
    for step in (None, 4):
        Saboteur(script).sign_in(step)
    starts = script.read_starts()
    assert [(s.pid, s.rank, s.world_size, s.step) for s in starts] == [
        (os.getpid(), 0, 1, None),
        (os.getpid(), 0, 1, 4),
    ]


def test_nan_poisons_the_next_batch(tmp_path: Path) -> None:
    def batch(num_samples: int) -> Batch:
        fields: dict[str, Any] = dict.fromkeys(Batch.__dataclass_fields__)
        return Batch(**(fields | {"images": torch.ones(2, 3, 4, 4), "ids": range(num_samples)}))

    saboteur = Saboteur(Script(str(tmp_path)))
    finite = []
    for i, got in enumerate(saboteur.poison(batch(n) for n in (2, 2, 0, 2, 2))):
        finite.append(bool(got.images.isfinite().all()))
        if i == 1:
            faults.FAULTS["NaN"](saboteur)
    assert finite == [True, True, True, False, True]


# --- the door ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, problem",
    [
        (["--only", "SIGKIL"], "--only SIGKIL: must be of crash"),
        (["--jobs", "0"], "--jobs: 0: must be"),
        (["--only", "torn write", "--place", "step"], "no fault of --only"),
        (["--folder", str(REPOSITORY)], "must be empty or new"),
    ],
    ids=["fault", "jobs", "no cell", "folder"],
)
def test_mistakes(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        door.main(argv)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("verdict, code", [("same run", 0), ("refused", 0), ("LOST", 1)])
def test_exit_code(
    verdict: Any,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = Outcome(verdict, "resumed", "resumed at step 4")
    monkeypatch.setattr(door, "prepare", Site)
    monkeypatch.setattr(
        door, "run_cells", lambda site, cells, jobs: ((cell, outcome, 1.0) for cell in cells)
    )
    to = tmp_path / "outcomes.json"
    argv = ["--only", "OOM,NaN", "--rank", "1", "--json", str(to), "--folder", str(tmp_path / "x")]
    assert door.main(argv) == code
    said = capsys.readouterr().out
    assert f"1/8  OOM, rank 1 at start: {verdict}, resumed at step 4 (1 s)" in said
    assert f"8 {verdict}" in said.splitlines()[-1 if code == 0 else -2]
    told = json.loads(to.read_text())
    assert [(t["fault"], t["rank"], t["verdict"]) for t in told] == [
        (fault, 1, verdict) for fault in ("OOM", "NaN") for _ in faults.PLACES
    ]


def test_a_run_that_does_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(*_: object, **__: object) -> Site:
        raise UserError("the drill's run does not train")

    monkeypatch.setattr(door, "prepare", prepare)
    assert door.main(["--folder", str(tmp_path / "x")]) == 2
    assert "does not train" in capsys.readouterr().err
