"""The drill: break a small real run in every way at every place, and see what is left of it.

Each cell starts a run with one fault, starts the same command again without it until it ends, as a
user would, and compares what came out with a run that nothing happened to. Level 8.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lockstep.checkpoint.manifest import MANIFEST, step_folders
from lockstep.checkpoint.saver import RECORDS
from lockstep.checkpoint.shards import INDEX
from lockstep.data.digits import digit_files
from lockstep.drill.faults import FAULTS, PLACES, WRITER, Script
from lockstep.errors import EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from lockstep.launch.hang import process_state
from lockstep.telemetry.compare import compare_runs
from lockstep.telemetry.files import read_records

RUN = "run"
"""Name of every run; each has a root of its own."""

NUM_PROCESSES = 2
RANKS = range(NUM_PROCESSES)
DAMAGE = ("torn write", "flipped bit")
"""Faults of a file of a run that stands still."""
NODES = ("lost node", "rejoin")
"""Faults of an agent, one of two; in a rejoin it comes back."""
FILES = ("shard", MANIFEST, INDEX, RECORDS)
PLACES_OF = {
    **dict.fromkeys(FAULTS, PLACES),
    WRITER: ("save",),
    **dict.fromkeys(DAMAGE, FILES),
    **dict.fromkeys(NODES, PLACES),
}

TRAINING = (
    "device=cpu", "strategy=ddp", "batch.global=20", "batch.micro=7", "steps=10",
    "model=vit_tiny", "+model.kwargs.depth=2", "+model.kwargs.embed_dim=48", "model.drop_path=0.2",
    "augment=strong", "ema.enabled=true", "optimizer.lr=0.003",
    "data.image_size=16", "data.num_classes=4", "data.workers=1", "telemetry.console=false",
    "evaluate.every_epochs=null", "evaluate.every_steps=2",
    "checkpoint.every_epochs=null", "checkpoint.every_steps=2",
)  # fmt: skip
NUM_IMAGES = {"train": 47, "val": 23}
"""A slice of uneven size for every rank, and a shorter step at each end of an epoch."""
AFTER_STEP = 5
"""When a fault strikes: two checkpoints are there, and an evaluation and a save are to come."""
STOP_AT = 6
"""Where a run stands still whose files are damaged."""
TOLERANCE = 1e-4
MAX_STARTS = 4
HANG_SECONDS = 15
"""The run's patience with a process that hangs, where one does."""
GATHER_SECONDS = 5
"""How long a group that lost a node waits for another one."""
SECONDS_ALONE = 5.0
"""How long a step takes while a lost node has yet to come back: it has much to import."""
PATIENCE_SECONDS = 180
"""Ours, with one start."""


@dataclass(frozen=True)
class Cell:
    """One fault at one place."""

    fault: str
    rank: int | None
    """The process that it strikes; None: a file."""
    place: str

    def __str__(self) -> str:
        return " ".join([self.row, "at" if self.rank is not None else "of", self.place])

    @property
    def row(self) -> str:
        return self.fault if self.rank is None else f"{self.fault}, rank {self.rank}"


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    verdict: Literal["same run", "refused", "LOST"]
    """refused: a start said why it does not go on, and a later one went on: nothing is lost."""
    how: str
    """A word for the table: restarted, resumed, fell back, re-formed, rejoined, unharmed."""
    why: str
    """A sentence."""


@dataclass(frozen=True)
class Site:
    """Where a drill takes place."""

    conf: Path
    """The folder of the config groups."""
    folder: Path
    asynchronous: bool = False
    """Whether checkpoints are written behind the training, as on GPUs."""

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def reference(self) -> Path:
        """Root of the run to which nothing happens."""
        return self.folder / "reference"


@dataclass(frozen=True)
class End:
    """How one start of the command ended."""

    code: int
    said: str
    hung: bool = False

    @property
    def line(self) -> str:
        """What it said at the end, as one line."""
        lines = [line for line in self.said.splitlines() if line.strip()] or ["nothing"]
        return next((x[7:] for x in lines if x.startswith("error: ")), lines[-1]).strip()


def all_cells(
    faults: Sequence[str] = (), rank: int | None = None, place: str | None = None
) -> list[Cell]:
    """The cells of these faults, this rank, this place; all where not said."""
    return [
        Cell(fault, struck, at)
        for fault in faults or PLACES_OF
        for struck in ([None] if fault in DAMAGE else RANKS)
        for at in PLACES_OF[fault]
        if rank in (None, struck) and place in (None, at)
    ]


def prepare(conf: Path, folder: Path, *, asynchronous: bool = False) -> Site:
    """Write the images and train the run that nothing happens to.

    Raises:
        UserError: it does not train.
    """
    site = Site(conf, folder, asynchronous)
    left = dict(NUM_IMAGES)
    for path, data in sorted(digit_files().items(), key=lambda item: Path(item[0]).name):
        split, label, _ = path.split("/")
        if int(label) < 4 and left[split]:
            left[split] -= 1
            (site.data / path).parent.mkdir(parents=True, exist_ok=True)
            (site.data / path).write_bytes(data)
    site.reference.mkdir(exist_ok=True)
    end = _start(site, site.reference, Script(str(site.reference)))
    if end.code != EXIT_OK:
        raise UserError(f"the drill's run does not train even without a fault:\n{end.said}")
    return site


def run_cells(
    site: Site, cells: Sequence[Cell], *, jobs: int
) -> Iterator[tuple[Cell, Outcome, float]]:
    """Run cells, ``jobs`` at a time; yields each with its outcome and seconds, in their order."""

    def timed(cell: Cell) -> tuple[Cell, Outcome, float]:
        began = time.monotonic()
        return cell, run_cell(site, cell), time.monotonic() - began

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(timed, cells)


def run_cell(site: Site, cell: Cell) -> Outcome:
    """Start, break, start again; what became of the run."""
    root = site.folder / str(cell).replace(" ", "-").replace(",", "")
    root.mkdir()
    script, harmless = _script(cell, root), Script(str(root))
    if cell.fault in DAMAGE:
        ends = [_start(site, root, harmless, "stop_at=6")]
        if ends[0].code != EXIT_STOPPED:
            return Outcome("LOST", "", f"did not stop at a step: {ends[0].line}")
        _damage(root / RUN, cell)
    else:
        needs = {"SIGSTOP": [f"launch.timeout_seconds={HANG_SECONDS}"]}
        rejoin = cell.fault == "rejoin"
        ends = [
            _start(
                site, root, script, *needs.get(cell.fault, []), nodes=_nodes(cell), rejoin=rejoin
            )
        ]
    while ends[-1].code != EXIT_OK and len(ends) < MAX_STARTS:
        ends.append(_start(site, root, harmless, nodes=_nodes(cell)))
    try:
        return _judge(site, cell, script, ends)
    except (UserError, OSError) as exc:
        return Outcome("LOST", "", f"cannot be compared: {exc}")


def _nodes(cell: Cell) -> int:
    return 2 if cell.fault in NODES else 1


def _script(cell: Cell, root: Path) -> Script:
    if cell.rank is None:
        return Script(str(root))
    return Script(
        folder=str(root),
        fault="SIGKILL agent" if cell.fault in NODES else cell.fault,
        rank=cell.rank,
        place=cell.place,
        after_step=AFTER_STEP,
        seconds_alone=SECONDS_ALONE if cell.fault == "rejoin" else 0.0,
    )


def _start(
    site: Site, root: Path, script: Script, *overrides: str, nodes: int = 1, rejoin: bool = False
) -> End:
    """One start of the command, on one node or on two, until all its processes have ended.

    Args:
        rejoin: an agent that was killed comes back when the other trains alone.
    """
    words = [*TRAINING, f"data.root={site.data}", f"run.root={root}", "launch.max_restarts=1"]
    words += [f"launch.processes={NUM_PROCESSES // nodes}", *overrides]
    if site.asynchronous or script.fault == WRITER:
        words.append("checkpoint.async=true")
    second = script
    if nodes > 1:
        second = replace(script, wait_for_port=_free_port())
        meet = f"launch.rendezvous=localhost:{second.wait_for_port}"
        words += [f'launch.nodes="1:{nodes}"', meet, f"launch.gather_seconds={GATHER_SECONDS}"]
    log = root / f"start-{len(list(root.glob('start-*.log')))}.log"

    def agent(script: Script) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "lockstep.drill", str(site.conf), *words],
                env=os.environ | script.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    # The first is the host of the rendezvous, and has rank 0.
    agents = [agent(script), *(agent(second) for _ in range(1, nodes))]
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while any(a.poll() is None for a in agents):
            if time.monotonic() > deadline:
                return End(-1, log.read_text(errors="replace"), hung=True)
            alone = (s for s in script.read_starts() if s.world_size == 1 and s.step is not None)
            if rejoin and next(alone, None):
                rejoin = False
                agents.append(agent(script))
            time.sleep(0.1)
    finally:
        for a in agents:
            a.kill()  # its workers end with it
            a.wait()
    # Of two agents, the one that is left tells how the run ended.
    codes = sorted((a.returncode for a in agents), key=lambda code: (code != EXIT_OK, -code))
    return End(codes[0], log.read_text(errors="replace"))


def _damage(run: Path, cell: Cell) -> None:
    """Break a file of the newest checkpoint, or the run's records."""
    newest = step_folders(run / "checkpoints")[0][1]
    shard = min(newest.glob("*.distcp"))
    path = {"shard": shard, RECORDS: run / RECORDS}.get(cell.place, newest / cell.place)
    data = bytearray(path.read_bytes())
    if cell.fault == "torn write":
        del data[-len(data) // 8 :]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _judge(site: Site, cell: Cell, script: Script, ends: list[End]) -> Outcome:
    run, reference = Path(script.folder) / RUN, site.reference / RUN
    starts = script.read_starts()
    begun = [s.step for s in starts if s.rank == 0 and s.step is not None]
    if why := _lost(cell, script, ends, begun):
        return Outcome("LOST", "", why)
    found = compare_runs(reference, run, tolerance=TOLERANCE)
    if found.parting is not None:
        return Outcome("LOST", "", f"another run: {found.parting}")
    if _outline(run) != _outline(reference):
        return Outcome("LOST", "", "not the records of a run without a fault")
    worlds = [s.world_size for s in starts if s.rank == 0 and s.step is None]
    how = _how(cell, worlds, len(ends), begun[-1])
    why = f"{how} at step {begun[-1]}"
    if refusals := [end.line for end in ends if end.code == EXIT_USER_ERROR]:
        return Outcome("refused", how, f"{refusals[0].replace(str(run), 'RUN')}; then {why}")
    return Outcome("same run", how, why)


def _lost(cell: Cell, script: Script, ends: list[End], begun: list[int]) -> str | None:
    """Why the run is lost, without a look at its records; None: it is not."""
    if any(end.hung for end in ends):
        return f"hang: still there after {PATIENCE_SECONDS} s"
    if script.fault is not None and not script.fired.exists():
        return "the fault never struck"
    if ends[-1].code != EXIT_OK:
        return f"{len(ends)} starts, and the last ends with {ends[-1].code}: {ends[-1].line}"
    if not wait(lambda: not any(_runs(s.pid) for s in script.read_starts()), 5):
        return "a process outlives the run"
    if cell.place != "start" and 0 in begun[1:]:
        return "started over, although there were checkpoints"
    return None


def _how(cell: Cell, worlds: list[int], num_starts: int, step: int) -> str:
    """In a word, how the run went on.

    Args:
        worlds: number of processes each time that they came together.
        step: from which it went on last.
    """
    if cell.fault in DAMAGE and step < STOP_AT:
        return "fell back"
    if num_starts > 1:
        return "resumed"
    if cell.fault in NODES:
        return "rejoined" if worlds[-1] > min(worlds) else "re-formed"
    return "restarted" if len(worlds) > 1 else "unharmed"


def _outline(run: Path) -> list[tuple[str, int, str | None]]:
    """Which records there are, in their order."""
    return [(r["kind"], r["step"], r.get("weights")) for r in read_records(run / RECORDS)]


def table(outcomes: Iterable[tuple[Cell, Outcome, float]], seconds: float) -> str:
    """Faults and ranks as rows, places as columns; the reasons and a summary below."""
    rows: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    notes: dict[str, int] = {}
    counts = dict.fromkeys(("same run", "refused", "LOST"), 0)
    for cell, outcome, _ in outcomes:
        counts[outcome.verdict] += 1
        text = f"{outcome.verdict}, {outcome.how}"
        if outcome.verdict != "same run":
            text = f"{outcome.verdict} [{notes.setdefault(outcome.why, len(notes) + 1)}]"
        rows.setdefault(PLACES_OF[cell.fault], {}).setdefault(cell.row, {})[cell.place] = text
    lines = []
    for places, cells in rows.items():
        lines.append(_line("", places))
        lines += [_line(row, [of.get(p, "") for p in places]) for row, of in cells.items()]
        lines.append("")
    lines += [f"[{number}] {why}" for why, number in notes.items()]
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return "\n".join([*lines, f"{sum(counts.values())} cells: {told} ({seconds:.0f} s)"])


def _line(row: str, cells: Iterable[str]) -> str:
    return "".join([f"{row:<23}", *(f"{cell:<22}" for cell in cells)]).rstrip()


def wait(ready: Callable[[], bool], seconds: float) -> bool:
    """Until it is so, or the time is over; returns whether it is so."""
    deadline = time.monotonic() + seconds
    while not (done := ready()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return done


def _runs(pid: int) -> bool:
    """Whether a process is there; one that has ended and waits for its parent is not."""
    return process_state(pid) not in (None, "Z")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("localhost", port)) == 0
