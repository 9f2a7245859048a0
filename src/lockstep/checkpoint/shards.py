"""The tensors of a checkpoint, through torch.distributed.checkpoint (DCP). Level 4.

DCP reshards on load, so shards fit every strategy and number of processes. Its index
(``.metadata``) is a pickle: here it is read with an allow-list, and only tensors are admitted, so
that a stranger's checkpoint executes nothing.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.serialization import _get_layout, set_crc32_options

from lockstep import dist
from lockstep.errors import UserError, some

Tensors = dict[str, dict[str, torch.Tensor]]
"""Group ("model", "optimizer", "ema") to name to tensor: plain or DTensor, on any device."""

INDEX = ".metadata"
"""Name of DCP's own list of what is where."""
_UNREADABLE = (OSError, EOFError, KeyError, ValueError, RuntimeError, pickle.UnpicklingError)
_NUM_NAMED = 3
_NUM_FILES, _SMALL_BYTES = 8, 256 * 2**20
"""Files that a rank writes, and then reads for their checksums, at the same time; a small state is
one file."""

# The manifest has checksums.
set_crc32_options(False)
# DCP's hint on every save of a single process.
warnings.filterwarnings("ignore", message="torch.distributed is .*", category=UserWarning)


def plan_of(tensors: Tensors) -> SavePlan:
    """What this rank would write of its tensors and where they belong in the whole: plain values."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(_flat(tensors), is_coordinator=dist.is_main())
    return planner.create_local_plan()


def write(folder: Path, tensors: Tensors, plan: SavePlan | None = None) -> None:
    """Write every rank's shards and the index into an existing folder. All ranks enter here.

    Args:
        plan: of a process in which the tensors were distributed ones; here they are local parts.

    Raises:
        OSError: on every rank, when one of them could not write.
    """
    num_bytes = sum(local(t).nbytes for group in tensors.values() for t in group.values())
    with _dcp_call():
        dcp_save(
            _flat(tensors),
            storage_writer=_Writer(folder, _NUM_FILES if num_bytes > _SMALL_BYTES else 1),
            planner=_PlannedBefore(plan) if plan else DefaultSavePlanner(flatten_state_dict=False),
        )


def own_files(folder: Path) -> list[Path]:
    """The shards that this rank wrote; the index was written by rank 0."""
    return sorted(folder.glob(f"__{dist.rank()}_*.distcp"))


def read(folder: Path, files: Collection[str], tensors: Tensors) -> None:
    """Fill ``tensors`` in place. All ranks enter here.

    Args:
        files: names of the verified files; no other is opened.

    Raises:
        UserError: keys, shapes or dtypes differ, or a file holds what it must not.
    """
    flat = _flat(tensors)

    def check() -> Metadata:
        index = _read_index(folder, files)
        _check_fit(folder.name, index.state_dict_metadata, flat)
        return index

    _load(folder, dist.together(check), flat, no_dist=not dist.is_distributed())


def read_full(folder: Path, files: Collection[str]) -> Tensors:
    """Whole tensors on the CPU of this process alone. Raises as ``read``."""
    index = _read_index(folder, files)
    flat = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in index.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    _load(folder, index, flat, no_dist=True)
    tensors: Tensors = {}
    for key, tensor in flat.items():
        group, _, name = key.partition("/")
        tensors.setdefault(group, {})[name] = tensor
    return tensors


def _flat(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Keys ``group/name``: DCP's own flattening joins by dots, which names contain."""
    assert not any("/" in group for group in tensors)
    return {f"{g}/{name}": t for g, group in tensors.items() for name, t in group.items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; the tensor itself where nothing is sharded."""
    return dist.local_part(tensor).detach()


def _load(folder: Path, index: Metadata, flat: dict[str, torch.Tensor], *, no_dist: bool) -> None:
    try:
        with _dcp_call():
            dcp_load(
                flat,
                storage_reader=_Reader(folder, index),
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                no_dist=no_dist,
            )
    except torch.OutOfMemoryError:
        raise
    except _UNREADABLE as exc:
        raise UserError(f"{folder}: a shard cannot be read: {exc}") from exc


def _check_fit(name: str, saved: dict[str, Any], flat: dict[str, torch.Tensor]) -> None:
    def form(shape: torch.Size, dtype: torch.dtype) -> str:
        return f"{list(shape)} {str(dtype).removeprefix('torch.')}"

    problems = []
    if missing := flat.keys() - saved.keys():
        problems.append(f"it lacks {some(sorted(missing), _NUM_NAMED)}")
    if unexpected := saved.keys() - flat.keys():
        problems.append(f"it holds {some(sorted(unexpected), _NUM_NAMED)}, which the run has not")
    changed = [
        f"{key} ({old}, here {new})"
        for key, tensor in flat.items()
        if key in saved
        and (old := form(saved[key].size, saved[key].properties.dtype))
        != (new := form(tensor.shape, tensor.dtype))
    ]
    if changed:
        problems.append(f"it differs in {some(sorted(changed), _NUM_NAMED)}")
    if problems:
        raise UserError(
            f"{name} does not fit this run: {'; '.join(problems)}. "
            "Use the configuration that saved it, or another run.name"
        )


# --- reading the index ------------------------------------------------------------------------

_CLASSES = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        Metadata,
        StorageMeta,
        TensorStorageMetadata,
        _StorageInfo,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.MetadataIndex,
        dcp_metadata.TensorProperties,
        dcp_metadata._MEM_FORMAT_ENCODING,
    )
} | {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): _get_layout}


def _member(kind: Any, name: str) -> Any:
    """What Python 3.11.0 to 3.11.3 pickle ``getattr`` for, and nothing else."""
    if kind is not dcp_metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for an attribute {name}")
    return kind[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _read_index(folder: Path, files: Collection[str]) -> Metadata:
    try:
        with (folder / INDEX).open("rb") as file:
            index: Metadata = _IndexUnpickler(file).load()
        items = index.state_dict_metadata
        if not all(isinstance(item, TensorStorageMetadata) for item in items.values()):
            raise pickle.UnpicklingError("it lists something that is not a tensor")
        stored = {info.relative_path for info in index.storage_data.values()}
        if foreign := stored - set(files):
            raise pickle.UnpicklingError(f"it points at {min(foreign)}")
        if any(info.transform_descriptors for info in index.storage_data.values()):
            raise pickle.UnpicklingError("it asks for stream extensions")
    # A forged pickle fails in any way it likes.
    except Exception as exc:
        raise UserError(f"{folder / INDEX}: refused, not an index of tensors: {exc}") from exc
    return index


# --- what DCP does not do ---------------------------------------------------------------------


class _Reader(FileSystemReader):
    """Reads by an index that was checked; never unpickles one."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class _PlannedBefore(DefaultSavePlanner):
    """Writes local parts by the plan of another process."""

    def __init__(self, plan: SavePlan) -> None:
        super().__init__(flatten_state_dict=False)
        self._given = plan

    def create_local_plan(self) -> SavePlan:
        self.plan = self._given
        return self.plan

    def lookup_object(self, index: dcp_metadata.MetadataIndex) -> Any:
        return self.state_dict[index.fqn]


class _Writer(FileSystemWriter):
    """Writes durably and reports the operating system's own error."""

    def __init__(self, folder: Path, num_files: int) -> None:
        super().__init__(folder, sync_files=True, thread_count=num_files)
        self.fs = _ReportingFileSystem()

    def storage_meta(self) -> StorageMeta:
        # Without the folder's path: the index stays the same wherever a run is moved.
        return StorageMeta()


class _ReportingStream:
    """Remembers a failed write: torch.save reports it as an unspecific RuntimeError."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, data: Any) -> Any:
        try:
            return self._stream.write(data)
        except OSError as exc:
            self.error = exc
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _ReportingFileSystem(FileSystem):
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            reporting = _ReportingStream(stream)
            try:
                yield reporting
            except RuntimeError as exc:
                if reporting.error is None:
                    raise
                raise reporting.error from exc


@contextmanager
def _dcp_call() -> Iterator[None]:
    """Raise the cause instead of DCP's wrapper, the same on every rank."""
    try:
        yield
    except CheckpointException as exc:
        causes = [cause for _, (cause, _) in sorted(exc.failures.items())]
        # An OSError first: other ranks may merely have noticed it.
        raise next((c for c in causes if isinstance(c, OSError)), causes[0]) from exc
