"""From composed YAML to the typed configuration, and what follows from it: law, fingerprint, name.

Level 0: imports no torch.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lockstep.config.schema import Config
from lockstep.durable import atomic_write
from lockstep.errors import UserError

NOT_LAW = (
    "run.*", "resume", "plan", "stop_at", "device", "deterministic", "compile", "launch.*", "strategy.*", "nccl.*",
    "telemetry.*", "sweep.*", "checkpoint.*", "guard.*", "evaluate.batch", "evaluate.every_*", "data.root",
    "data.source", "data.cache", "data.worker_kind", "data.workers", "data.prefetch", "batch.micro", "model.activation_checkpointing",
)  # fmt: skip
"""Keys that say where, when or how fast, but not what is computed (patterns)."""

ONCE_LAW = {"data.on_error": "stop"}
"""Keys that were law when runs were saved, and what counts as their value now, so that names with it
stay (of other runs, run.name=OLD finds the folder).
An image that cannot be read ends a run or is left out of it: runs that go on compute the same."""

LAW_ALL_THE_SAME = ("strategy.sync_batchnorm",)
"""Exceptions from :data:`NOT_LAW`: what they change is the result."""

_ABSENT = object()

_LONGEST_NAME = 200
"""Of a run's folder: file systems allow 255, and its name becomes part of others."""

ADDED: dict[str, Any] = {
    "data.source": "folder",
    "data.cache": "auto",
    "data.gpu_share": None,
    "data.worker_kind": "auto",
    "data.shuffle_block": 1,
    "precision.residual": "fp32",
    "model.draw": "model",
    "strategy.reduce": "auto",
    "strategy.wrap": "block",
    "launch.scheduler": "local",
    "launch.dry_run": False,
    "launch.slurm": {},
    "sweep.jobs": "auto",
    "sweep.gpus_per_job": None,
    "sweep.metric": "top1",
    "sweep.prune": None,
    "sweep.prune_from": 0.25,
    "sweep.prune_after": 4,
}
"""Keys that came after runs had been saved, and what those did."""


def bind(raw: DictConfig | Mapping[str, Any]) -> Config:
    """Check a composed configuration and freeze it.

    Args:
        raw: Hydra's result, or plain values; a ``hydra`` node is dropped.

    Raises:
        UserError: one line for every key that is unknown, missing or of a wrong value.
    """
    tree = raw if isinstance(raw, DictConfig) else OmegaConf.create(dict(raw))
    tree = OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])
    try:
        values: Any = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as exc:
        key = getattr(exc, "full_key", None) or "configuration"
        raise UserError(f"{key}: {str(exc).splitlines()[0]}") from exc
    fields = schema_fields()
    problems = {
        key: f"{key} has no value: set {key}=... ({describe(key)})"
        for key in sorted(OmegaConf.missing_keys(tree))
    }
    for key, message in _misread_by_yaml(values, fields):
        problems.setdefault(key, message)
    try:
        config = Config.model_validate(values)
    except ValidationError as exc:
        for key, message in _explain(exc, values, fields).items():
            problems.setdefault(key, message)
    if problems:
        raise UserError("\n".join(problems.values()))
    return config


def load_config(path: Path) -> Config:
    """Read a saved ``config.yaml``.

    Raises:
        UserError: no such file, not YAML, or not a configuration.
    """
    try:
        # OmegaConf loads with a safe loader: a tag such as !!python/object is an error.
        raw = OmegaConf.load(path)
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as exc:
        raise UserError(f"{path}: {' '.join(str(exc).split())}") from exc
    if not isinstance(raw, DictConfig):
        raise UserError(f"{path}: not a configuration")
    return bind_saved(raw)


def bind_saved(raw: DictConfig | Mapping[str, Any]) -> Config:
    """Bind what this version or an earlier one has saved. Raises UserError as :func:`bind` does."""
    tree = raw if isinstance(raw, DictConfig) else OmegaConf.create(dict(raw))
    for key, value in ADDED.items():
        if OmegaConf.select(tree, key, default=_ABSENT) is _ABSENT:
            with suppress(OmegaConfBaseException):  # no section to put it in: bind tells
                OmegaConf.update(tree, key, value, force_add=True)
    return bind(tree)


def save_config(config: Config, path: Path) -> None:
    """Write the configuration as YAML from which ``train.py`` repeats the run; atomic."""
    values = config.model_dump(mode="json", by_alias=True)
    atomic_write(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())


def law(config: Config) -> dict[str, Any]:
    """The keys that define the result of a run, dotted and flat, with plain values."""
    flat = flatten(config.model_dump(mode="json", by_alias=True))
    on_device = config.data.cache == "gpu"  # cropped there, pixels differ by a step of 255
    # What an earlier version did without saying is no difference, neither here nor in a run's name.
    return {
        key: ONCE_LAW.get(key, value)
        for key, value in flat
        if ADDED.get(key, _ABSENT) != value
        if key in LAW_ALL_THE_SAME
        or (key == "data.cache" and on_device)
        or not any(fnmatchcase(key, pattern) for pattern in NOT_LAW)
    }


def fingerprint(config: Config) -> str:
    """Eight hexadecimal digits that stand for the law."""
    text = json.dumps(law(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def run_name(config: Config, choices: Mapping[str, str], swept: Sequence[str]) -> str:
    """The folder of a run below ``run.root``; the same configuration gives the same name.

    Args:
        choices: option chosen in each config group.
        swept: the overrides in which this job of a sweep differs from its siblings.

    Raises:
        UserError: ``run.name`` is not a plain folder name.
    """
    name = config.run.name
    if name is not None and (Path(name).name != name or name[:1] in ("", ".")):
        raise UserError(f"run.name = {name}: must be a folder name; its place is run.root")
    told = {"run.name"}
    if name is None:
        model = choices.get("model", "timm")
        model = config.model.name if model == "timm" else model
        name = f"{config.data.name}-{model}-{config.strategy.name}-{fingerprint(config)}"
        told = {"run.name", "data", "model", "strategy"}
    for override in swept:
        key, _, value = override.lstrip("+~").partition("=")
        if key not in told:
            name += f"-{key}.{value}"
    name = re.sub(r"[^A-Za-z0-9._=-]+", "_", name)
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: _LONGEST_NAME - 9]}-{digest}"
    return name


def schema_fields() -> dict[str, FieldInfo]:
    """Every key of the schema, sections included, by its dotted name."""
    return dict(_walk(Config, ""))


def open_dicts() -> list[str]:
    """The keys below which any name is legal: they are passed on to another library."""
    fields = schema_fields().items()
    return [key for key, field in fields if get_origin(field.annotation) is dict]


def describe(key: str) -> str:
    """What the schema says about a key."""
    field = schema_fields().get(key)
    return (field and field.description) or "see conf/"


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """``; did you mean X?``, or nothing when no known word is close."""
    same_end = [k for k in known if k.rpartition(".")[2] == word.rpartition(".")[2]]
    close = same_end or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close:
        ends = {k.rpartition(".")[2]: k for k in known}
        close = [ends[e] for e in difflib.get_close_matches(word.rpartition(".")[2], ends, n=1)]
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        yield key, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _walk(field.annotation, key + ".")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _types(annotation: Any) -> list[Any]:
    """The alternatives of a type, literals as their values."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _types(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [t for part in get_args(annotation) for t in _types(part)]
    return list(get_args(annotation)) if origin is Literal else [annotation]


def _misread_by_yaml(
    values: dict[str, Any], fields: Mapping[str, FieldInfo]
) -> Iterator[tuple[str, str]]:
    """Undo in place what YAML reads too cleverly (``off`` as false, ``run.name=7`` as a number).

    Yields problems: a yes or no where a number belongs would count as 1 or 0.
    """
    for key, field in fields.items():
        *path, last = key.split(".")
        section = _get(values, path)
        if not isinstance(section, dict) or last not in section:
            continue
        value, types = section[last], _types(field.annotation)
        if value is False and "off" in types:
            section[last] = "off"
        elif isinstance(value, bool) and bool not in types and (int in types or float in types):
            yield key, f"{key} = {_shown(value)}: should be a number"
        elif isinstance(value, int) and not isinstance(value, bool) and str in types:
            section[last] = value if int in types else str(value)


def _explain(
    error: ValidationError, values: dict[str, Any], fields: Mapping[str, FieldInfo]
) -> dict[str, str]:
    """One line a key; what pydantic says of the alternatives of a union is joined."""
    said: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"]]
        if item["type"] == "extra_forbidden":
            unknown = ".".join(parts)
            hint = did_you_mean(unknown, list(fields))
            said[unknown] = [f"unknown key{hint}"]
            continue
        # What follows the key in `loc` is a list index or pydantic's name of an alternative.
        length = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in fields)
        key = ".".join(parts[:length])
        if item["type"] == "missing":
            absent = f"no value in the YAML ({describe(key)})"
            message = absent if length == len(parts) else "has too few values"
        elif item["type"] in ("model_type", "model_attributes_type", "dict_type"):
            below = [k for k in fields if k.startswith(key + ".")]
            message = f"is a section: set {', '.join(below) or key + '.NAME'}"
        else:
            message = re.sub(r"^(Input|Value error,|Value|Tuple) ", "", item["msg"])
            words = [t for t in _types(fields[key].annotation) if isinstance(t, str)]
            if isinstance(item["input"], str) and words:
                message += did_you_mean(item["input"], words)
        if message not in said.setdefault(key, []):
            said[key].append(message)
    lines = {}
    for key, messages in said.items():
        value = _get(values, key.split("."))
        shown = "" if value is None and "no value" in messages[0] else f" = {_shown(value)}"
        lines[key] = f"{key}{shown}: {', or '.join(messages)}"
    return lines


def _get(tree: Any, path: Sequence[str]) -> Any:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
