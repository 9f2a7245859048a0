"""What Git knows: revisions, trees, and which files are not committed. Level 8.

Git's own command line: its plumbing is stable, and nothing of it writes into the working tree.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.errors import UserError


@dataclass(frozen=True)
class Repository:
    """A working tree under Git and DVC; trees and commits are named by their hashes."""

    root: Path

    @classmethod
    def find(cls, place: Path) -> Repository:
        """The repository around a folder. Raises UserError where Git or DVC has none."""
        top = Path(cls(place).git("rev-parse", "--show-toplevel").rstrip("\n"))
        if not (top / ".dvc").is_dir():
            raise UserError(f"{top}: DVC is not set up here; `dvc init` does it")
        return cls(top)

    @property
    def state(self) -> Path:
        """Where rollbacks keep what they work on: on the disk of the working tree, ignored."""
        return self.root / ".dvc/tmp/rollback"

    def git(self, *words: str, stdin: str | None = None, index: Path | None = None) -> str:
        """What a command prints.

        Args:
            index: work on this file instead of the repository's index.

        Raises:
            UserError: it fails; in Git's words.
        """
        try:
            done = subprocess.run(
                ["git", *words],
                cwd=self.root,
                env=os.environ | ({"GIT_INDEX_FILE": str(index)} if index else {}),
                input=stdin,
                capture_output=True,
                encoding="utf-8",
                errors="surrogateescape",
                check=False,
            )
        except OSError as exc:
            raise UserError(f"cannot run git in {self.root}: {exc.strerror}") from exc
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise UserError(f"git {words[0]}: {said}")
        return done.stdout

    def commit(self, name: str) -> str:
        """The commit that a branch, tag or abbreviation means. Raises UserError."""
        try:
            return self.git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
        except UserError as exc:
            raise UserError(
                f"{name}: no such revision; `python scripts/rollback.py list` shows them"
            ) from exc

    def staged(self) -> str:
        """The tree that a commit would record now. Raises UserError during a merge."""
        return self.git("write-tree").strip()

    def record(self, tree: str, message: str) -> str:
        """A commit of a tree on top of HEAD, on no branch."""
        author = ("-c", "user.name=rollback", "-c", "user.email=rollback@localhost")
        return self.git(*author, "commit-tree", tree, "-p", "HEAD", "-m", message).strip()

    def unsaved(self) -> set[str]:
        """Files whose content is not that of the index; one that is gone can lose nothing."""
        return set(
            _split(self.git("diff", "--name-only", "--diff-filter=d", "--no-ext-diff", "-z"))
        )

    def changed(self, before: str, after: str) -> dict[str, bool]:
        """Files that differ between two trees or commits, and whether ``after`` has them."""
        options = ("-r", "-z", "--no-renames", "--ignore-submodules", "--name-status")
        fields = _split(self.git("diff-tree", *options, before, after))
        return {path: kind != "D" for kind, path in zip(fields[::2], fields[1::2], strict=True)}

    def replaced(self, tree: str, source: str, paths: Collection[str]) -> str:
        """``tree`` with these files as ``source`` has them, or has them not."""
        entries = {
            entry.partition("\t")[2]: entry
            for entry in _split(self.git("ls-tree", "-r", "-z", "--full-tree", source))
        }
        nothing = f"0 {'0' * 40}\t"
        wanted = "".join(f"{entries.get(path, nothing + path)}\0" for path in paths)
        with self._scratch(tree) as index:
            self.git("update-index", "-z", "--index-info", stdin=wanted, index=index)
            return self.git("write-tree", index=index).strip()

    def write(self, tree: str, paths: Iterable[str], to: Path) -> None:
        """Copies of a tree's files below ``to``, as a checkout would make them."""
        names = "".join(f"{path}\0" for path in paths)
        with self._scratch(tree) as index:
            words = ("checkout-index", "-f", "-z", "--stdin", f"--prefix={to}/")
            self.git(*words, stdin=names, index=index)

    def files(self, tree: str) -> list[str]:
        """Every path of a tree."""
        return _split(self.git("ls-tree", "-r", "-z", "--name-only", "--full-tree", tree))

    def read(self, tree: str, path: str) -> str | None:
        """A file of a tree or commit; None where it has none."""
        try:
            return self.git("cat-file", "blob", f"{tree}:{path}")
        except UserError:
            return None

    def ref(self, name: str) -> str | None:
        """The commit that a reference of ours holds."""
        return self.git("for-each-ref", "--format=%(objectname)", name).strip() or None

    @contextmanager
    def _scratch(self, tree: str) -> Iterator[Path]:
        """An index that holds a tree."""
        with TemporaryDirectory() as folder:
            index = Path(folder) / "index"
            self.git("read-tree", tree, index=index)
            yield index


def _split(listing: str) -> list[str]:
    return [part for part in listing.split("\0") if part]
