"""The versions of a repository, and what changed between two of them. Level 8."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from lockstep.config.bind import flatten
from lockstep.versions.outputs import CHECKPOINTS, LOCK, Output, digests, outputs
from lockstep.versions.repository import Repository

WEIGHTS = f"{CHECKPOINTS}/model.safetensors"
CARD = f"{CHECKPOINTS}/model.json"
_NOT_COMPARED = ("run.name", "run.root")


@dataclass(frozen=True)
class Version:
    """A commit that brought other data or other weights."""

    commit: str
    date: str
    """Of the commit, as 2026-05-31."""
    subject: str
    data: list[Output]
    card: dict[str, Any] | None
    """Of the weights; None where the commit brought other data alone."""
    is_here: bool
    """Data and weights are those of the working tree."""


@dataclass(frozen=True)
class Difference:
    """What changed from one version to another."""

    folders: dict[str, Counts]
    """By folder of data, for images usually the class."""
    cards: dict[str, dict[str, tuple[Any, Any]]]
    """Recipe, metrics, versions: keys that differ, and both values; None where absent."""


@dataclass
class Counts:
    """Files of one folder."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Of other content under the same name."""


def versions(repository: Repository, most: int) -> list[Version]:
    """The newest versions on any branch or tag, newest first. Raises UserError."""
    here = repository.staged()
    data_here, card_here = _data(repository, here), repository.read(here, CARD)
    found = []
    for commit, date, subject, changed in _log(repository, most):
        data, card = _data(repository, commit), repository.read(commit, CARD)
        brought = _parsed(card) if CARD in changed else None
        is_here = data == data_here and card == card_here
        found.append(Version(commit, date, subject, data, brought, is_here))
    return found


def difference(repository: Repository, a: str, b: str) -> Difference:
    """Compare the versions of two commits.

    Raises:
        UserError: the list of files of one is neither in the cache nor in the remote.
    """
    before, after = _files(repository, a, b), _files(repository, b, a)
    folders: dict[str, Counts] = defaultdict(Counts)
    for path in sorted(before.keys() | after.keys()):
        counts = folders[str(PurePosixPath(path).parent)]
        if path not in before:
            counts.added.append(path)
        elif path not in after:
            counts.removed.append(path)
        elif before[path] != after[path]:
            counts.changed.append(path)
    card_a, card_b = (_parsed(repository.read(commit, CARD)) or {} for commit in (a, b))
    told = {
        part: _differing(card_a.get(part) or {}, card_b.get(part) or {})
        for part in ("recipe", "metrics", "versions")
    }
    return Difference({k: v for k, v in folders.items() if v != Counts()}, told)


def _log(repository: Repository, most: int) -> Iterator[tuple[str, str, str, list[str]]]:
    """Hash, date, subject and changed files of commits that brought a version."""
    words = ("--branches", "--tags", "HEAD", f"--max-count={most}", "--diff-merges=first-parent")
    form = ("-z", "--name-only", "--format=%x01%H%x02%cs%x02%s%x02")
    places = ("--", "*.dvc", CARD, LOCK)
    for entry in repository.git("log", *words, *form, *places).split("\x01")[1:]:
        commit, date, subject, files = entry.split("\x02", 3)
        yield commit, date, subject, files.strip("\0\n").split("\0")


def _data(repository: Repository, tree: str) -> list[Output]:
    return [output for output in outputs(repository, tree).values() if not output.is_made]


def _files(repository: Repository, commit: str, other: str) -> dict[str, str]:
    """MD5 of each file of the data that is not the same in the other commit."""
    same = _data(repository, other)
    parts = (digests(repository, commit, o) for o in _data(repository, commit) if o not in same)
    return {path: md5 for part in parts for path, md5 in part.items()}


def _parsed(card: str | None) -> dict[str, Any] | None:
    try:
        values = json.loads(card or "null")
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    flat_a, flat_b = dict(flatten(a)), dict(flatten(b))
    return {
        key: (flat_a.get(key), flat_b.get(key))
        for key in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(key) != flat_b.get(key) and key not in _NOT_COMPARED
    }
