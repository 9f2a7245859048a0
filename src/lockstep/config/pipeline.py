"""The configuration of the DVC pipeline: from ``params.yaml`` to one file that says all of a run.

DVC tracks files and does not compose Hydra's. So the pipeline composes first; the resolved YAML is
what the training stage depends on, and conf files that do not change it retrain nothing. Level 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir

from lockstep.config.bind import bind, run_name
from lockstep.config.cli import explain, read_command
from lockstep.config.schema import Config
from lockstep.errors import UserError

SECTION = "train"
OVERRIDES = "overrides"


def resolve(
    conf: Path, params: Path, inputs: Iterable[Path], *, packed: Path | None = None
) -> Config:
    """Compose, check and name the pipeline's run.

    A finished run is never trained again, so the name of its folder holds a digest of what makes
    it besides the configuration: other data or code is another run.

    Args:
        conf: the folder of the config groups.
        params: file whose section ``train`` holds options of config groups (null: the usual one),
            and under ``overrides`` a list of further words of the command line.
        inputs: files and folders that the run is made from.
        packed: folder of packed images to train from, unless ``overrides`` name others; an input.

    Raises:
        UserError: a choice or value is wrong, or an input is missing.
    """
    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            words = read_command([*_place(packed), *read_params(params)]).overrides
            raw = compose("config", words, return_hydra_config=True)
            choices = dict(raw.hydra.runtime.choices)
            config = bind(raw)
    except Exception as exc:
        message = explain(exc, conf)
        if message is None:
            raise
        raise UserError(f"{params}: {message}") from exc
    name = f"{run_name(config, choices, swept=[])}-{content_digest([*inputs, *([packed] if packed else [])])}"
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def read_params(path: Path) -> list[str]:
    """The overrides that ``params.yaml`` stands for. Raises UserError."""
    try:
        section = yaml.safe_load(path.read_text())[SECTION]
        words = section[OVERRIDES] or []
        chosen = {k: v for k, v in section.items() if k != OVERRIDES and v is not None}
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as exc:
        raise UserError(
            f"{path}: expected a section {SECTION} of GROUP: OPTION and {OVERRIDES}: [KEY=VALUE, "
            f"...] ({' '.join(str(exc).split())})"
        ) from exc
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"{path}: {SECTION}.{OVERRIDES} = {words}: must be a list of KEY=VALUE")
    return [f"{key}={value}" for key, value in chosen.items()] + words


def content_digest(inputs: Iterable[Path]) -> str:
    """Eight hexadecimal digits over names and bytes of files, and of all files below folders.

    Raises:
        UserError: one does not exist or cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for top in inputs:
            for path in [top] if not top.is_dir() else _below(top):
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{top.name}/{path.relative_to(top).as_posix()} {content}\n".encode())
    except OSError as exc:
        raise UserError(f"{exc.filename}: {exc.strerror}; `make data` makes the images") from exc
    return digest.hexdigest()[:8]


def _place(packed: Path | None) -> list[str]:
    return [] if packed is None else ["data.source=packed", f"data.root={packed}"]


def _below(top: Path) -> list[Path]:
    """Files below a folder in a fixed order; what Python leaves there is no part of it."""
    return sorted(p for p in top.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
