"""Weights for the world: safetensors with timm's names, and a card beside them. Level 4.

The card lies beside the weights (``model.safetensors``, ``model.json``) and holds plain JSON: the
recipe, the metrics, digests of the data, the revision, the versions, and a checksum that ties it
to the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lockstep.checkpoint.manifest import describe
from lockstep.durable import atomic_write, sync_folder
from lockstep.errors import UserError

_GIT_TIMEOUT_SECONDS = 10


def export_weights(state: dict[str, torch.Tensor], path: Path, *, card: dict[str, Any]) -> None:
    """Write ``path`` (``*.safetensors``) and its card; ``timm.create_model`` loads the weights.

    Args:
        state: whole tensors under timm's names, any device, dtype and memory format; names may
            share one tensor.
        card: plain JSON values.

    Raises:
        UserError: the disk is full or refuses; what was there before is intact.
    """
    assert path.suffix == ".safetensors", path
    seen: set[int] = set()
    tensors = {}
    for name, tensor in state.items():
        tensor = tensor.detach().to("cpu", memory_format=torch.contiguous_format).contiguous()
        # The format refuses shared memory; timm expects every name to be there.
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    partial, partial_card = (p.with_name(f".{p.name}.tmp") for p in (path, card_path(path)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # safetensors makes its files for the user alone: this is the mode that others have.
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(mode)
        entry = describe(partial)
        weights = {
            "file": path.name,
            "size": entry.size,
            "sha256": entry.sha256,
            "num_tensors": len(tensors),
        }
        atomic_write(partial_card, json.dumps(card | {"weights": weights}, indent=2).encode())
        # Both are whole before one takes its place.
        partial.replace(path)
        partial_card.replace(card_path(path))
        sync_folder(path.parent)
    except (OSError, SafetensorError) as exc:
        for half in (partial, partial_card):
            with suppress(OSError):  # of a file system that cannot be written
                half.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path}: {exc}. Make room, or choose another place, and run the same command "
            "again"
        ) from exc


def card_path(path: Path) -> Path:
    """Where the card of exported weights lies."""
    return path.with_suffix(".json")


def read_card(path: Path) -> dict[str, Any]:
    """The card of exported weights, given either of the two files.

    Raises:
        UserError: no card, not a card, or the weights are not those that it describes.
    """
    card_file = card_path(path)
    try:
        card: dict[str, Any] = json.loads(card_file.read_bytes())
        entry = card["weights"]
        named = card_file.with_name(Path(entry["file"]).name)
        weights, digest = path if path.suffix == ".safetensors" else named, entry["sha256"]
    except OSError as exc:
        raise UserError(f"{card_file}: no card ({exc.strerror}); export the run again") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise UserError(f"{card_file}: not a card of exported weights ({exc})") from exc
    try:
        with weights.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise UserError(f"{weights}: cannot be read ({exc.strerror})") from exc
    if found != digest:
        raise UserError(f"{weights}: not the weights that {card_file.name} describes; export again")
    return card


def git_revision(path: Path) -> dict[str, Any] | None:
    """``{"revision": hash, "dirty": bool}`` of the repository around ``path``; None if unknown."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(path), *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            # Only look: do not refresh the index under somebody else's command.
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        ).stdout.strip()

    try:
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
