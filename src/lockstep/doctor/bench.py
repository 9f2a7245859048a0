"""Measures cases, one after the other, each in processes of its own; tables and comparisons."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
from hydra import compose, initialize_config_dir

from lockstep import __version__
from lockstep.checkpoint.export import git_revision
from lockstep.config.bind import bind
from lockstep.config.cli import explain, quoted, read_command
from lockstep.config.plan import DataFacts, ModelFacts, Plan, make_plan
from lockstep.config.schema import Config, Model
from lockstep.doctor import case
from lockstep.doctor.clock import Effort
from lockstep.doctor.hardware import peak_flops
from lockstep.errors import EXIT_OK, UserError
from lockstep.launch.prepare import data_facts, machine
from lockstep.launch.process import Job
from lockstep.machine import nvidia_smi
from lockstep.models.build import count

Record = dict[str, Any]

ALWAYS = (
    "data=imagenet", "augment=none", "schedule=constant", "optimizer.lr=1e-5", "steps=1000000",
    "telemetry.console=false", "checkpoint.async=false", "checkpoint.every_epochs=null",
    "evaluate.every_epochs=null",
)  # fmt: skip
"""Of every case, unless the user says otherwise. The rate is too small for anything to diverge; to
``compile=auto``, it is a part of a long run."""
REAL = ("data=folder", "augment=standard")
"""And of a case with images of the user's."""
SAME = (
    "model", "way", "strategy", "shard", "wrap", "reduce", "images", "precision", "compile", "processes", "global_batch", "micro_batch",
    "image_size", "optimizer", "overrides",
)  # fmt: skip
"""What makes rows of two files the same case."""
_PEER_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
_IMAGENET_CLASSES = 1000
_FAREWELL_SECONDS = 10
_LOG_CHARACTERS = 4000


@dataclass(frozen=True)
class Case:
    """One thing to measure: a run, or a peer of it."""

    way: str
    """``lockstep``, or one of :data:`lockstep.doctor.peers.PEERS`."""
    config: Config
    plan: Plan
    overrides: tuple[str, ...] = ()
    """The user's own."""
    real: bool = False
    """Whether the images of ``data.root`` are read and decoded."""

    @property
    def label(self) -> Record:
        """What was asked for, by which rows are told apart."""
        config, plan = self.config, self.plan
        return {
            "model": config.model.name,
            "way": self.way,
            "strategy": plan.strategy,
            "shard": plan.shard if plan.strategy in ("fsdp", "hsdp") else None,
            "wrap": "model" if config.strategy.wrap == "model" else None,
            "reduce": plan.reduce if plan.strategy == "ddp" else None,
            "precision": config.precision.name,
            "compile": plan.compile,
            "processes": plan.world_size * plan.devices_per_process,
            "global_batch": plan.global_batch,
            "micro_batch": plan.micro_batch,
            "image_size": plan.image_size,
            "optimizer": config.optimizer.name,
            "images": config.data.root if self.real else None,
            "overrides": list(self.overrides),
        }

    def __str__(self) -> str:
        return f"{self.config.model.name}, {way_of(self.label)}"


@dataclass(frozen=True)
class Matrix:
    """Everything that shall be measured."""

    models: Sequence[str]
    strategies: Sequence[str]
    precisions: Sequence[str]
    compile: Sequence[str]
    peers: Sequence[str]
    """Of :data:`lockstep.doctor.peers.PEERS`."""
    batch: int
    """Images of one process (of one GPU) in a step."""
    image_size: int
    device: str
    processes: int
    overrides: Sequence[str] = ()


def cases_of(conf: Path, matrix: Matrix) -> Iterator[Case | tuple[Record, str]]:
    """All cases, model by model; a combination that the plan refuses as its label and the reason.

    Raises:
        UserError: a word that no case could be made of.
    """
    sizes = (f"data.image_size={matrix.image_size}", f"device={matrix.device}")
    for model in matrix.models:
        base = [*model_words(conf, model), *sizes]
        asked: dict[tuple[str, ...], None] = {}
        for precision in matrix.precisions:
            for strategy, mode in product(matrix.strategies, matrix.compile):
                asked[(case.LOCKSTEP, strategy, precision, mode)] = None
            theirs = precision if precision in _PEER_PRECISIONS else "bf16"
            for way in matrix.peers:
                mode = "off" if way == "plain eager" else "default"
                asked[(way, "ddp" if matrix.processes > 1 else "single", theirs, mode)] = None
        seen: list[dict[str, Any]] = []
        for way, strategy, precision, mode in asked:
            words = [*base, f"strategy={strategy}", f"precision={precision}", f"compile={mode}"]
            try:
                made = make_case(
                    conf, way, words, matrix.overrides,
                    processes=matrix.processes, batch=matrix.batch,
                )  # fmt: skip
                if made.label not in seen:  # auto may mean what is asked for, too
                    seen.append(made.label)
                    yield made
            except Refused as exc:
                asked_for = {
                    "model": model, "way": way, "strategy": strategy, "precision": precision,
                    "compile": mode, "processes": matrix.processes,
                }  # fmt: skip
                yield asked_for, str(exc)


class Refused(UserError):
    """The words are legal, but the plan says that they cannot run together."""


def make_case(
    conf: Path,
    way: str,
    words: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    processes: int,
    batch: int,
    images: Path | None = None,
) -> Case:
    """A case from Hydra's words.

    Args:
        conf: folder of the config groups.
        overrides: the user's own words; they come last, and are told in the record.
        processes: or GPUs, which strategy=dp drives from one process.
        batch: images of one of them in a step.
        images: folder of images to be read and decoded; None: random ones that cost nothing.

    Raises:
        UserError: a word is wrong. Refused: the plan cannot run them.
    """
    overrides = tuple(read_command(list(overrides)).overrides)
    size = f"batch.global={batch * processes}"
    real = () if images is None else (*REAL, f"data.root={quoted(str(images.resolve()))}")
    told = {_key(word): word for word in (*ALWAYS, *real, size, *words, *overrides)}
    config = _composed(conf, told)
    facts = _facts(config)
    if not told.keys() & {"optimizer", "optimizer.name"}:
        # What such networks are usually trained with.
        told["optimizer"] = f"optimizer={'sgd' if facts.has_batchnorm else 'adamw'}"
        config = _composed(conf, told)
    here = machine()
    here = replace(here, num_gpus=min(here.num_gpus, processes))
    each = {"processes": 1 if config.strategy.name == "dp" else processes}
    config = config.model_copy(update={"launch": config.launch.model_copy(update=each)})
    data = DataFacts(config.batch.global_batch, 1, _classes(config))
    if images is not None:
        data = data_facts(config.data, may_be_absent=False)
    try:
        plan = make_plan(config, here, data, facts)
    except UserError as exc:
        raise Refused(str(exc)) from exc
    if plan.tries_micro:
        raise UserError("batch.micro = auto: its trials are no part of a step; give a number")
    return Case(way, config, plan, overrides, real=images is not None)


def model_words(conf: Path, name: str) -> list[str]:
    """A config group of that name, else timm's model."""
    if (conf / "model" / f"{name}.yaml").is_file():
        return [f"model={name}"]
    return ["model=timm", f"model.name={name}"]


def measure(case_: Case, effort: Effort, *, timeout_seconds: float, reuse: bool = False) -> Record:
    """Measure one case in fresh processes; whatever becomes of them, there is a record.

    Args:
        reuse: let torch.compile find what it compiled before, also for other cases.

    Returns:
        The case's label, and either ``error`` or the figures: images_per_second and ms_per_step
        (median, least, most, values), mfu, memory_bytes, compile_seconds, ...
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        run_dir = Path(folder) / "run"
        environment = os.environ | _visible_gpus(case_.plan)
        if not reuse:
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "compiled")
        job = _job(case_, effort, run_dir)
        case.order(run_dir, case_.way, effort, real=case_.real)
        job.save(run_dir.parent / "job.json")
        code, log = _run(run_dir.parent, environment, timeout_seconds)
        found = case.result(run_dir)
    label = case_.label | {"steps": effort.steps, "warmup": effort.warmup, "reuse": reuse}
    if found is None or code != EXIT_OK:
        within = f"{timeout_seconds:g} s" + (
            "" if case_.plan.compile == "off" else ", compiling included"
        )
        error = f"not done in {within}: raise --timeout" if code is None else _reason(log)
        return label | {"error": error, "log": log[-_LOG_CHARACTERS:]}
    return label | figures(case_, effort, found)


def figures(case_: Case, effort: Effort, found: Record) -> Record:
    """What is told of a measured case, from the seconds of its repeats."""
    plan = case_.plan
    flops = 3 * plan.model.forward_flops
    peak = peak_flops(found["gpu"] or "", case_.config.precision.name)
    roof = None if peak is None else peak * case_.label["processes"] / flops
    seconds = [s / effort.steps for s in found["repeat_seconds"]]
    rates = [plan.global_batch / s for s in seconds]
    return {
        "images_per_second": _spread(rates, 1),
        "ms_per_step": _spread([1e3 * s for s in seconds], 3),
        "mfu": None if roof is None else round(median(rates) / roof, 4),
        "roofline_images_per_second": None if roof is None else round(roof, 1),
        "flops_per_image": flops,
        "parameters": plan.model.parameters,
        "memory_bytes": found["memory_bytes"],
        "compile_seconds": round(max(0.0, found["first_step_seconds"] - median(seconds)), 2),
        "warmup_seconds": round(found["warmup_seconds"], 2),
        "gpu": found["gpu"],
        "profile": found["profile"],
    }


def environment() -> Record:
    """What figures need beside them."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git": git_revision(Path.cwd()),
        "versions": {
            "lockstep": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "timm": timm.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if torch.cuda.device_count() else None,
        },
        "gpus": nvidia_smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
        or [],
        "cores": machine().cores,
    }


def way_of(row: Mapping[str, Any]) -> str:
    """Whose row it is, and how, in words."""
    if row["way"] != case.LOCKSTEP:
        return f"{row['way']} {row['precision']}" + (" ddp" if row["strategy"] == "ddp" else "")
    shard = f" {row['shard']}" if row.get("shard") else ""
    if row.get("wrap") == "model":
        shard += " wrap=model"
    if row.get("reduce") == "after":
        shard = " after"
    images = " files" if row.get("images") else ""
    return f"lockstep {row['strategy']}{shard} {row['precision']} compile={row['compile']}{images}"


def header() -> str:
    """Of the columns of :func:`line`."""
    return (
        f"{'model':<22} {'way':<42} {'GPUs':>4} {'batch':>5} {'images/s':>9} {'least':>9} "
        f"{'most':>9} {'ms/step':>9} {'MFU':>6} {'memory':>9} {'compile':>8}"
    )


def line(row: Record) -> str:
    """A record as a row of the table."""
    start = f"{row['model']:<22} {way_of(row):<42} {row['processes']:>4}"
    if "error" in row:
        return f"{start} {row['error']}"
    rate, memory = row["images_per_second"], row["memory_bytes"]
    mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
    used = "" if memory is None else f"{memory / 2**30:.2f} GiB"
    return (
        f"{start} {row['global_batch']:>5} {rate['median']:>9,.0f} {rate['least']:>9,.0f} "
        f"{rate['most']:>9,.0f} {row['ms_per_step']['median']:>9.2f} {mfu:>6} {used:>9} "
        f"{row['compile_seconds']:>7.1f}s"
    )


def read(path: Path) -> Record:
    """A file that a benchmark has written.

    Raises:
        UserError: it is none.
    """
    try:
        found = json.loads(path.read_text())
        rows = found["rows"]
        assert all(isinstance(row, dict) and "model" in row for row in rows)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as exc:
        raise UserError(f"{path}: not a file of scripts/bench.py --json ({exc})") from exc
    return dict(found)


def compare(old: Record, new: Record, tolerance: float) -> tuple[list[str], bool]:
    """Lines that compare two files case by case, and whether any case became slower.

    Args:
        tolerance: fraction of the old images/s that may be missing.

    Raises:
        UserError: they have no case in common.
    """
    before, after = _by_case(old["rows"]), _by_case(new["rows"])
    common = [key for key in before if key in after]
    if not common:
        raise UserError("the two files have no case in common: run the same command for both")
    lines = [
        f"note: {name} was {a}, and is {b}"
        for name, a, b in _differences(_circumstances(old), _circumstances(new))
    ]
    lines.append(f"{'model':<22} {'way':<42} {'GPUs':>4} {'old':>9} {'new':>9} {'change':>8}")
    slower = False
    for key in common:
        a, b = before[key], after[key]
        start = f"{b['model']:<22} {way_of(b):<42} {b['processes']:>4}"
        if "error" in a or "error" in b:
            slower |= "error" not in a
            told = [row.get("error") or f"{_rate(row):,.0f} images/s" for row in (a, b)]
            lines.append(f"{start} was: {told[0]}; is: {told[1]}")
            continue
        change = _rate(b) / _rate(a) - 1
        mark = "  SLOWER" if change < -tolerance else ""
        slower |= bool(mark)
        lines.append(f"{start} {_rate(a):>9,.0f} {_rate(b):>9,.0f} {change:>+8.1%}{mark}")
    for name, ours, others in (("old", before, after), ("new", after, before)):
        lines += [
            f"only in the {name} file: {row['model']}, {way_of(row)}"
            for key, row in ours.items()
            if key not in others
        ]
    return lines, slower


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _composed(conf: Path, told: Mapping[str, str]) -> Config:
    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            return bind(compose("config", list(told.values())))
    except Exception as exc:
        message = explain(exc, conf)
        if message is None:
            raise
        raise UserError(message) from exc


def _classes(config: Config) -> int:
    return config.data.num_classes or _IMAGENET_CLASSES


def _facts(config: Config) -> ModelFacts:
    size = config.model.image_size or config.data.image_size
    return _counted(config.model.model_dump_json(), size, _classes(config))


@cache
def _counted(model: str, image_size: int, num_classes: int) -> ModelFacts:
    section = Model.model_validate_json(model)
    return count(section, image_size=image_size, num_classes=num_classes)


def rows_of(
    cases: Iterable[Case | tuple[Record, str]],
    effort: Effort,
    *,
    timeout_seconds: float,
    reuse: bool,
) -> Iterator[Record]:
    """Measure one after the other; what was refused says why."""
    for case_ in cases:
        if isinstance(case_, Case):
            yield measure(case_, effort, timeout_seconds=timeout_seconds, reuse=reuse)
        else:
            label, why = case_
            yield label | {"error": f"refused: {why}"}


def _job(case_: Case, effort: Effort, run_dir: Path) -> Job:
    """A run that is one step longer than what is measured: nothing happens at its end."""
    steps, batch = effort.total_steps + 1, case_.plan.global_batch
    plan = replace(case_.plan, total_steps=steps)
    run = case_.config.run.model_copy(update={"root": str(run_dir.parent), "name": run_dir.name})
    if not case_.real:
        plan = replace(
            plan,
            steps_per_epoch=steps,
            last_window=batch,
            data=replace(plan.data, num_train=steps * batch),
        )
    config = case_.config.model_copy(update={"run": run})
    return Job(config, plan, run_dir, case.MODULE, rank_zero_claims=False)


def _run(folder: Path, environment: dict[str, str], timeout: float) -> tuple[int | None, str]:
    """Exit code and output of the processes of one job; None: they were ended after ``timeout``."""
    log = folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", case.MODULE, str(folder / "job.json")],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code: int | None = process.wait(timeout)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        # Its workers die with it, in sessions of their own; compilers are in this one.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_FAREWELL_SECONDS)
    return code, log.read_text(errors="replace")


def _reason(log: str) -> str:
    """The line of a log that says why."""
    if "out of memory" in log.lower():
        return "out of memory"
    lines = [text.strip() for text in log.splitlines() if text.strip()] or ["ended without a word"]
    told = [text for text in lines if text.startswith("error: ") or "Error: " in text]
    return (told or lines)[-1][:200]


def _visible_gpus(plan: Plan) -> dict[str, str]:
    """Only as many GPUs as the case is about: DataParallel takes all that it sees."""
    if plan.device != "cuda":
        return {"CUDA_VISIBLE_DEVICES": ""}
    wanted = plan.world_size * plan.devices_per_process
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = before.split(",") if before else [str(i) for i in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[:wanted])}


def _spread(values: Sequence[float], digits: int) -> Record:
    return {
        "median": round(median(values), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
        "values": [round(value, digits) for value in values],
    }


def _rate(row: Record) -> float:
    return float(row["images_per_second"]["median"])


def _by_case(rows: Iterable[Record]) -> dict[str, Record]:
    return {json.dumps([row.get(name) for name in SAME]): row for row in rows}


def _circumstances(file: Record) -> Record:
    return dict(file.get("versions", {})) | {"GPU": ", ".join(file.get("gpus", [])) or "none"}


def _differences(old: Record, new: Record) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)
