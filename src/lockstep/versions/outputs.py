"""What DVC knows: the outputs of a revision, whether they are saved, and copies of them. Level 8.

Through what DVC documents: the formats of ``*.dvc`` and ``dvc.lock``, ``dvc data status --json`` on
the command line, and ``dvc.api.DVCFileSystem``, which alone reads another revision without touching
the working tree. ``dvc.repo.Repo`` is not documented and changes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from lockstep.errors import UserError
from lockstep.versions.repository import Repository

PIPELINE, LOCK = "dvc.yaml", "dvc.lock"
CHECKPOINTS = "checkpoints"
"""Folder of what a version is about: the weights, and in Git their card and figures."""
_NOT_INSTALLED = "DVC is not installed: pip install -e '.[dvc]'"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Output:
    """A file or folder that DVC keeps."""

    path: str
    """Below the repository."""
    md5: str
    said_by: str = field(compare=False)
    """The file that Git has of it: ``*.dvc``, or ``dvc.lock`` for what the pipeline makes."""
    entry: dict[str, Any] = field(compare=False)
    """Hash, size, number of files and settings, as that file states them."""

    @property
    def digest(self) -> str:
        """Eight digits of its hash."""
        return self.md5[:8]

    @property
    def is_cached(self) -> bool:
        """DVC keeps a copy; else it knows no more than the hash."""
        return self.entry.get("cache") is not False

    @property
    def is_made(self) -> bool:
        """The pipeline makes it: `dvc repro` can do so again."""
        return PurePosixPath(self.said_by).name == LOCK

    def holds_more(self, root: Path) -> bool:
        """Whether the unchanged folder has files that DVC ignores, and does not keep."""
        found = sum(len(files) for _, _, files in os.walk(root / self.path))
        return found > int(self.entry.get("nfiles", found))


def outputs(repository: Repository, tree: str) -> dict[str, Output]:
    """What DVC keeps in a tree or commit, by path; what is in Git itself is left out.

    Raises:
        UserError: a file of DVC's cannot be read.
    """
    tracked = repository.files(tree)
    in_git, found = set(tracked), {}
    for name in (PurePosixPath(path) for path in tracked):
        if name.parts[0] == ".dvc" or not (name.suffix == ".dvc" or name.name == LOCK):
            continue
        try:
            said = yaml.safe_load(repository.read(tree, str(name)) or "") or {}
            stages = said.get("stages", {}).values() if name.name == LOCK else [said]
            for entry in (entry for stage in stages for entry in stage.get("outs", [])):
                at = name.parent / said.get("wdir", ".") / entry["path"]
                path = os.path.normpath(at)
                if path not in in_git:
                    entry = {key: value for key, value in entry.items() if key != "path"}
                    md5 = str(entry.get("md5") or entry)  # another hash
                    found[path] = Output(path, md5, str(name), entry)
        except (yaml.YAMLError, AttributeError, KeyError, TypeError) as exc:
            raise UserError(f"{tree[:8]}:{name}: not a file of DVC's ({exc})") from exc
    return found


def unsaved(repository: Repository) -> tuple[set[str], set[str]]:
    """Outputs that changed since DVC recorded them, and those that its cache does not hold.

    An output that is not there at all is no change: nothing can be lost with it.

    Raises:
        UserError: DVC is not installed or refuses.
    """
    if find_spec("dvc") is None:
        raise UserError(_NOT_INSTALLED)
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "data", "status", "--json"],
        cwd=repository.root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"dvc data status: {' '.join(done.stderr.split())}")
    status = json.loads(done.stdout)
    kinds = {k: paths for k, paths in status.get("uncommitted", {}).items() if k != "deleted"}
    changed = {path.rstrip("/") for paths in kinds.values() for path in paths}
    return changed, {path.rstrip("/") for path in status.get("not_in_cache", [])}


def digests(repository: Repository, revision: str, output: Output) -> dict[str, str]:
    """MD5 of each file of an output, by its path below the repository.

    Raises:
        UserError: neither cache nor remote can tell.
    """
    files = _files(repository.root, revision)
    try:
        found = files.find(output.path, detail=True)
        return {path.lstrip("/"): str(info["md5"]) for path, info in found.items()}
    except Exception as exc:  # DVC's own, and those of every kind of remote
        raise _absent(revision, output, exc) from exc


def copy(repository: Repository, revision: str, output: Output, to: Path) -> None:
    """Copy an output of a commit from the cache, or from the remote, to ``to``.

    Raises:
        UserError: neither has it, or what they have is damaged.
        OSError: no room on the disk.
    """
    expected = digests(repository, revision, output)
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        files = _files(repository.root, revision)
        if files.isdir(output.path):
            files.get(output.path, str(to), recursive=True)
            to.mkdir(exist_ok=True)  # of an empty one nothing was copied
        else:
            files.get_file(output.path, str(to))
        for path, md5 in expected.items():
            with (to / os.path.relpath(path, output.path)).open("rb") as file:
                if hashlib.file_digest(file, "md5").hexdigest() != md5:
                    raise UserError(
                        f"{path}: DVC's copy of {revision[:8]} is damaged; remove .dvc/cache/files/"
                        f"md5/{md5[:2]}/{md5[2:]} and `dvc pull` it from a remote"
                    )
    except UserError:
        raise
    except Exception as exc:
        if isinstance(exc, OSError) and exc.errno in _DISK_FULL:
            raise
        raise _absent(revision, output, exc) from exc


def _absent(revision: str, output: Output, exc: Exception) -> UserError:
    return UserError(
        f"{output.path} of {revision[:8]} (md5 {output.md5}) is neither in DVC's "
        f"cache nor in the default remote ({' '.join(str(exc).split())[:200]}): fetch it from where "
        "it was pushed to, `dvc fetch --all-commits -r REMOTE`"
    )


@cache
def _files(root: Path, revision: str) -> Any:
    """DVC's file system of a commit; DVC is imported when it is needed, as it takes a second."""
    try:
        from dvc.api import DVCFileSystem
    except ImportError as exc:
        raise UserError(_NOT_INSTALLED) from exc
    return DVCFileSystem(str(root), rev=revision)
