"""Trained weights without training: found, evaluated, exported. Level 6.

A second composition root, of one process: it builds what an evaluation needs, from the recipe that
lies beside the weights, with the parts that training uses.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from lockstep.checkpoint.export import card_path, export_weights, read_card
from lockstep.checkpoint.manifest import check_law
from lockstep.checkpoint.store import Store, find_checkpoint
from lockstep.config.bind import bind_saved, fingerprint, law, load_config
from lockstep.config.plan import Machine, resolve_device
from lockstep.config.schema import Config, Fraction, PositiveInt
from lockstep.data import is_packed, open_split
from lockstep.data.loader import Loader
from lockstep.data.source import Source
from lockstep.engine.evaluate import evaluate
from lockstep.errors import UserError
from lockstep.machine import cores
from lockstep.metrics import EvalResult
from lockstep.models.build import build
from lockstep.strategy.precision import lower_residuals, set_matmul_precision, use_fp8
from lockstep.telemetry.files import read_records

Kind = Literal["raw", "ema"]
Wanted = Literal["auto", "raw", "ema"]
"""``auto``: the averaged weights where there are any, as a run's own summary has it."""


_Known = TypeVar("_Known", bound=BaseModel)


class _Metrics(BaseModel):
    model_config = ConfigDict(extra="allow")
    step: int
    weights: Kind


class _Card(BaseModel):
    """What a card must hold, whoever wrote it."""

    fingerprint: str | None = None
    """Of the recipe; cards of earlier versions have none."""
    recipe: dict[str, Any]
    num_classes: PositiveInt
    image_size: PositiveInt
    classes: list[str] | None
    metrics: _Metrics
    data: dict[str, str]
    git: dict[str, Any] | None
    versions: dict[str, str]
    gpu_share: Fraction = 0.0


@dataclass(frozen=True)
class Weights:
    """Trained weights and what made them."""

    state: dict[str, torch.Tensor]
    """Whole tensors on the CPU under timm's names."""
    config: Config
    card: dict[str, Any]
    """All that the card of an export says, except the checksum of its file."""
    notes: list[str]
    """What the user should know of where they come from."""

    @property
    def kind(self) -> Kind:
        kind: Kind = self.card["metrics"]["weights"]
        return kind

    @property
    def step(self) -> int:
        return int(self.card["metrics"]["step"])


@dataclass(frozen=True)
class Evaluation:
    """Figures of one evaluation, and what was evaluated."""

    result: EvalResult
    step: int
    kind: Kind
    num_left_out: int
    """Images that could not be read (``data.on_error=skip``)."""
    digest: str
    """Of the images, as a card has it."""
    notes: list[str]

    def text(self) -> str:
        """One line for people."""
        r = self.result
        left_out = f", {self.num_left_out:,} unreadable left out" if self.num_left_out else ""
        return (
            f"top-1 {r.top1:.2f} %  top-5 {r.top5:.2f} %  loss {r.loss:.4f}  {r.count:,} images"
            f"{left_out} ({self.kind} weights, step {self.step:,})"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self.result) | {"weights": self.kind, "step": self.step}


class _Progress(BaseModel):
    best_top1: float | None
    best_step: int | None
    skipped_steps: list[int] = []


class _Meta(BaseModel):
    """What a checkpoint must hold, to be evaluated."""

    law: dict[str, Any]
    progress: _Progress
    data: dict[str, str]
    versions: dict[str, str]
    # It need not name these, to be trained on.
    classes: list[str] | None = None
    git: dict[str, Any] | None = None
    gpu_share: Fraction = 0.0


def read_weights(where: Path, wanted: Wanted) -> Weights:
    """The weights of a run folder (its newest good checkpoint), a checkpoint or an export.

    Raises:
        UserError: nothing usable is there, or not the wanted kind.
    """
    if where.suffix == ".safetensors" and not where.exists():
        raise UserError(f"{where}: no such file")
    return read_export(where, wanted) if where.is_file() else read_checkpoint(where, wanted)


def read_export(where: Path, wanted: Wanted) -> Weights:
    """Exported weights; ``where`` is the ``.safetensors`` file or its card. Raises UserError."""
    if where.suffix not in (".safetensors", ".json"):
        raise UserError(f"{where}: give a run folder, a step-N folder or a .safetensors file")
    card = read_card(where)
    path = where
    if where.suffix == ".json":
        path = where.with_name(Path(card["weights"]["file"]).name)
    made = _checked(_Card, card, card_path(where), "export the run again").model_dump()
    kind = made["metrics"]["weights"]
    if wanted not in ("auto", kind):
        raise UserError(f"--weights {wanted}: {path} holds the {kind} weights alone")
    try:
        state = load_file(path)
    except SafetensorError as exc:
        raise UserError(f"{path}: not a safetensors file ({exc}); export the run again") from exc
    return Weights(state, bind_saved(made["recipe"]), made, [])


def read_checkpoint(where: Path, wanted: Wanted) -> Weights:
    """The newest good checkpoint of a run folder, or the one that is named.

    Raises:
        UserError: nothing usable, no configuration beside it, or not the wanted kind of weights.
    """
    found = find_checkpoint(where)
    run_dir = found.path.resolve().parent.parent
    config = load_config(run_dir / "config.yaml")
    meta = _checked(_Meta, found.meta, found.path, "choose another checkpoint")
    check_law(meta.law, law(config))
    tensors = Store.load_full(found)
    if wanted == "ema" and "ema" not in tensors:
        raise UserError(f"--weights ema: {found.path} has none; the run had ema.enabled=false")
    kind: Kind = "ema" if wanted != "raw" and "ema" in tensors else "raw"
    # The average covers what is trained; other buffers are the model's own.
    state = tensors["model"] | (tensors["ema"] if kind == "ema" else {})
    card = {
        "fingerprint": fingerprint(config),
        "recipe": config.model_dump(by_alias=True, mode="json"),
        "num_classes": _num_classes(run_dir),
        "image_size": config.model.image_size or config.data.image_size,
        "classes": meta.classes,
        "metrics": {
            "run": str(where),
            "step": found.step,
            "weights": kind,
            **_recorded(run_dir, found.step, kind),
            **meta.progress.model_dump(),
        },
        "data": meta.data,
        "git": meta.git,
        "versions": meta.versions,
        "gpu_share": meta.gpu_share,
    }
    return Weights(state, config, card, [*found.notes, f"read {found.path}"])


def evaluate_weights(
    weights: Weights, *, root: Path | None, batch: int | None, device: str
) -> Evaluation:
    """Evaluate on the validation images, exactly as training does.

    Args:
        root: folder that holds ``val``; None: the run's own.
        batch: images in one forward pass; None: the run's own.
        device: auto, cuda or cpu.

    Raises:
        UserError: no GPU, no images, other classes, or weights that do not fit the model.
    """
    config = weights.config
    # What serves training alone is left out: the weights are here, and nothing is recomputed.
    model_config = config.model.model_copy(
        update={"pretrained": False, "activation_checkpointing": False}
    )
    here = Machine(torch.cuda.device_count(), cores(), None)
    wanted = config.model_copy(update={"device": device})
    place = torch.device(resolve_device(wanted, here))
    set_matmul_precision(config.precision)
    source, notes = _images(weights, root)
    loader = Loader(
        source,
        config.data,
        None,
        image_size=weights.card["image_size"],
        seed=config.seed,
        device=place,
        threads=config.data.workers or here.cores,
    )
    if share := weights.card.get("gpu_share", 0.0):  # as the run's own evaluation
        reason = loader.prepare_gpu()
        if reason is None:
            loader.gpu_share = share
        else:
            note = (
                f"the run's GPU decoded {share:.0%} of the JPEGs, and this one none ({reason}): "
                "where colours are stored at half the size, pixels differ a little"
            )
            notes = [*notes, note]
    model = build(
        model_config,
        image_size=weights.card["image_size"],
        num_classes=weights.card["num_classes"],
        seed=config.seed,
        meta=False,
    )
    try:
        # Weights that nobody has drawn are not there to be copied to.
        model.load_state_dict(weights.state, assign=config.model.draw == "parameter")
    except RuntimeError as exc:
        raise UserError(
            f"the weights do not fit {config.model.name} as timm builds it here: "
            f"{' '.join(str(exc).split())[:300]}; made with {weights.card['versions']}"
        ) from exc
    if config.precision.name == "fp8":
        try:
            use_fp8(model, place)
        except UserError as exc:
            reason = str(exc).removesuffix(": use precision=bf16")
            note = f"the run computed in 8 bits, and this evaluation in 16 ({reason}): figures differ a little"
            notes = [*notes, note]
    if config.precision.residual == "low":
        lower_residuals(model, config.precision)
    if place.type == "cuda":
        model.to(memory_format=torch.channels_last)
    with closing(loader):
        result = evaluate(
            model.to(place),
            loader,
            config.precision,
            batch=batch or config.evaluate.batch,
            device=place,
        )
    return Evaluation(result, weights.step, weights.kind, loader.num_left_out, source.digest, notes)


def export(weights: Weights, to: Path) -> None:
    """Write weights as safetensors with their card. Raises UserError where that fails."""
    if to.suffix != ".safetensors":
        raise UserError(f"{to}: the file's name must end in .safetensors")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UserError(f"{to}: cannot make its folder ({exc.strerror})") from exc
    export_weights(weights.state, to, card=weights.card)


def _checked(kind: type[_Known], values: Any, where: Path, fix: str) -> _Known:
    """Plain values from a file that anybody may have written."""
    try:
        return kind.model_validate(values)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{where}: {key}: {first['msg']}; {fix}") from exc


def _images(weights: Weights, root: Path | None) -> tuple[Source, list[str]]:
    """The validation images, and what is to be said about them."""
    card, data = weights.card, weights.config.data
    root = root or Path(data.root)
    source_kind = "packed" if is_packed(root / "val") else "folder"
    place = data.model_copy(update={"root": str(root), "source": source_kind})
    source = open_split(place, "val", classes=card["classes"])
    if len(source.classes) != card["num_classes"]:
        raise UserError(
            f"{root}/val has {len(source.classes)} class folders, but the weights tell "
            f"{card['num_classes']} classes apart: give a folder of the same classes as --data"
        )
    if source.digest == card["data"].get("val"):
        return source, []
    return source, [f"note: {source.folder} holds other images than training evaluated"]


def _num_classes(run_dir: Path) -> int:
    """As planned: the configuration may leave it to be counted in the training images."""
    path = run_dir / "plan.json"
    try:
        return int(json.loads(path.read_text())["data"]["num_classes"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UserError(f"{path}: not the plan of a run ({exc!r}); restore the file") from exc


def _recorded(run_dir: Path, step: int, kind: Kind) -> dict[str, Any]:
    """What training measured at a step; nothing where it did not evaluate then."""
    try:
        records = list(read_records(run_dir / "metrics.jsonl"))
    except OSError:
        return {}
    for record in reversed(records):
        if record["kind"] == "eval" and (record["step"], record["weights"]) == (step, kind):
            return {key: record[key] for key in ("top1", "top5", "loss", "count")}
    return {}
