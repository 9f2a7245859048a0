"""Tensors come back bit by bit under any number of processes; strangers execute nothing."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lockstep import dist
from lockstep.checkpoint import shards
from lockstep.checkpoint.manifest import Manifest, commit, describe
from lockstep.checkpoint.store import Found, Store, find_checkpoint
from lockstep.errors import UserError

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; all ranks enter here."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same(a: shards.Tensors, b: shards.Tensors) -> bool:
    assert {g: set(a[g]) for g in a} == {g: set(b[g]) for g in b}
    return all(
        torch.equal(full(a[g][n]), full(b[g][n])) and a[g][n].dtype == b[g][n].dtype
        for g in a
        for n in a[g]
    )


KINDS: shards.Tensors = {
    "model": {
        "plain": torch.randn(5, 3),
        "scalar": torch.tensor(2.5),
        "counter": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "bfloat16": torch.randn(9).bfloat16(),
        "bool": torch.tensor([True, False]),
        "transposed": torch.randn(4, 6).t(),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "view": torch.randn(1000)[10:13],
        "with/slash and ünicode": torch.randn(1),
        "not finite": torch.tensor([float("nan"), float("inf")]).nan_to_num(nan=1.0, posinf=2.0),
    },
    "optimizer": {},
    "ema": {"parameter": nn.Parameter(torch.randn(2))},
}


def zeros_like(tensors: shards.Tensors) -> shards.Tensors:
    return {g: {n: torch.zeros_like(t) for n, t in group.items()} for g, group in tensors.items()}


def open_store(run_dir: Path) -> Store:
    return Store(run_dir, keep_last=1, keep_best=False, asynchronous=False)


def test_all_kinds_of_tensors_without_a_process_group(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(1, KINDS, {"a": [1, None]}, metric=None)
    found = find_checkpoint(tmp_path)
    target = zeros_like(KINDS)
    before = {n: t.data_ptr() for n, t in target["model"].items()}
    assert store.load(found, target) == {"a": [1, None]}
    assert same(target, KINDS)
    assert {n: t.data_ptr() for n, t in target["model"].items()} == before, "loaded in place"
    whole = Store.load_full(found)
    # Groups without a tensor leave no trace.
    assert same(whole, {g: group for g, group in KINDS.items() if group})


def test_a_view_is_saved_without_its_storage(tmp_path: Path) -> None:
    view = torch.zeros(1_000_000)[:10]
    open_store(tmp_path).save(1, {"model": {"view": view}}, {}, metric=None)
    assert (tmp_path / "checkpoints/step-1/__0_0.distcp").stat().st_size < 10_000


def test_the_index_tells_no_path(tmp_path: Path) -> None:
    open_store(tmp_path).save(1, KINDS, {}, metric=None)
    assert str(tmp_path).encode() not in (tmp_path / "checkpoints/step-1/.metadata").read_bytes()


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param(
            lambda t: t["model"].pop("b"), "it holds model/b, which the run has not", id="less"
        ),
        pytest.param(lambda t: t["model"].update(c=torch.zeros(1)), "it lacks model/c", id="more"),
        pytest.param(
            lambda t: t["model"].update(a=torch.zeros(3)),
            "it differs in model/a ([2] float32, here [3] float32)",
            id="shape",
        ),
        pytest.param(
            lambda t: t["model"].update(a=torch.zeros(2).half()),
            "model/a ([2] float32, here [2] float16)",
            id="dtype",
        ),
        pytest.param(
            lambda t: t.update(ema={f"x{i}": torch.zeros(1) for i in range(9)}),
            "it lacks ema/x0, ema/x1, ema/x2 and 6 more",
            id="many",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, change: Callable[[shards.Tensors], Any], message: str
) -> None:
    tensors = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    store = open_store(tmp_path)
    store.save(7, tensors, {}, metric=None)
    change(tensors)
    with pytest.raises(UserError) as caught:
        store.load(find_checkpoint(tmp_path), tensors)
    assert str(caught.value).startswith("step-7 does not fit this run") and message in str(
        caught.value
    )


# --- processes --------------------------------------------------------------------------------


def model_and_state(sharded: bool) -> tuple[nn.Module, shards.Tensors]:
    """A small net after one optimiser step; odd sizes shard unevenly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    if sharded:
        mesh = init_device_mesh("cpu", (dist.world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.linspace(-1, 1, 20).view(4, 5)).square().sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer, options=FLATTENED)
    return model, {
        "model": tensors_of(get_model_state_dict(model)),
        "optimizer": tensors_of(state),
        "ema": {n: p.detach().clone() for n, p in model.named_parameters()},
    }


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}


def reset(tensors: shards.Tensors) -> None:
    with torch.no_grad():
        for group in tensors.values():
            for tensor in group.values():
                tensor.zero_()


def _save_sharded(run_dir: Path, reference: Path) -> None:
    _, tensors = model_and_state(sharded=True)
    whole = {g: {n: full(t).detach() for n, t in group.items()} for g, group in tensors.items()}
    # Through the writers: what they get are local parts, and where those belong.
    store = Store(run_dir, keep_last=1, keep_best=False, asynchronous=True)
    store.save(1, tensors, {"world_size": dist.world_size()}, metric=None)
    store.approve(1)
    store.wait()
    store.close()
    dist.on_main(lambda: torch.save(whole, reference))


def _load(run_dir: Path, reference: Path, sharded: bool) -> None:
    _, tensors = model_and_state(sharded)
    reset(tensors)
    store = open_store(run_dir)
    found = store.find()
    assert found is not None
    assert store.load(found, tensors) == {"world_size": 2}
    assert same(tensors, torch.load(reference, weights_only=True))


@contextmanager
def alone(store: Path) -> Iterator[None]:
    """A process group of this process."""
    torch_dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield
    finally:
        torch_dist.destroy_process_group()


def test_two_sharded_processes_to_any_number(
    run_processes: Callable[..., None], tmp_path: Path
) -> None:
    reference = tmp_path / "reference.pt"
    run_processes(2, _save_sharded, tmp_path, reference)
    whole = Store.load_full(find_checkpoint(tmp_path))
    assert same(whole, torch.load(reference, weights_only=True))
    _load(tmp_path, reference, False)
    with alone(tmp_path / "gloo"):
        _load(tmp_path, reference, True)
    run_processes(3, _load, tmp_path, reference, True)


# --- strangers --------------------------------------------------------------------------------


class Payload:
    """Creates a file when unpickled carelessly."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def forged(run_dir: Path, forge: Callable[[Path], Any]) -> Found:
    """A checkpoint altered by somebody who also made its manifest fit."""
    tensors = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    open_store(run_dir).save(1, tensors, {}, metric=None)
    folder = run_dir / "checkpoints" / "step-1"
    forge(folder)
    files = {p.name: describe(p) for p in folder.iterdir() if p.suffix in (".distcp", "")}
    del files["COMMITTED"]
    commit(folder, Manifest(1, None, {}, files))
    return find_checkpoint(run_dir)


def forged_index(change: Callable[[dcp_metadata.Metadata, Path], Any]) -> Callable[[Path], Any]:
    def forge(folder: Path) -> None:
        index = pickle.loads((folder / ".metadata").read_bytes())
        replaced = change(index, folder)
        (folder / ".metadata").write_bytes(pickle.dumps(replaced if replaced else index))

    return forge


def _point_outside(index: dcp_metadata.Metadata, folder: Path) -> None:
    (folder.parent / "secret").write_bytes(b"secret")
    for info in index.storage_data.values():
        info.relative_path = "../secret"


def _bytes_item(index: dcp_metadata.Metadata, folder: Path) -> None:
    index.state_dict_metadata["model/a"] = dcp_metadata.BytesStorageMetadata()


def _size_item(index: dcp_metadata.Metadata, folder: Path) -> None:
    index.state_dict_metadata["model/a"] = torch.Size([1])  # type: ignore[assignment]


def _payload(index: dcp_metadata.Metadata, folder: Path) -> Any:
    return Payload(folder / "executed")


def _hidden_payload(index: dcp_metadata.Metadata, folder: Path) -> None:
    index.planner_data = Payload(folder / "executed")


def _extension(index: dcp_metadata.Metadata, folder: Path) -> None:
    for info in index.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]


class Attribute:
    """Asks for what a class has, which may be anything."""

    def __reduce__(self) -> Any:
        return getattr, (dcp_metadata.Metadata, "__init__")


def _attribute(index: dcp_metadata.Metadata, folder: Path) -> None:
    index.planner_data = Attribute()


STRANGERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "payload as index": (forged_index(_payload), "it asks for pathlib"),
    "payload within the index": (forged_index(_hidden_payload), "it asks for pathlib"),
    "attribute of a class": (forged_index(_attribute), "it asks for an attribute __init__"),
    "index of another type": (forged_index(lambda i, f: {"a": 1}), "not an index of tensors"),
    "no pickle": (lambda f: (f / ".metadata").write_bytes(b"?"), "not an index"),
    "dotted name": (
        lambda f: (
            (f / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c\x09hub._load\x93.") and None
        ),
        "it asks for torch.hub._load",
    ),
    "object to be unpickled": (forged_index(_bytes_item), "it asks for torch.distributed"),
    "item of another type": (forged_index(_size_item), "not a tensor"),
    "file outside": (forged_index(_point_outside), "it points at ../secret"),
    "stream extension": (forged_index(_extension), "stream extensions"),
    "payload as shard": (
        lambda f: (
            (f / "__0_0.distcp").write_bytes(
                pickle.dumps(Payload(f / "executed"), protocol=2).ljust(5000, b"\0")
            )
            and None
        ),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("forge, message", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_executes_nothing(
    tmp_path: Path, forge: Callable[[Path], Any], message: str
) -> None:
    found = forged(tmp_path, forge)
    tensors = {"model": {"a": torch.ones(2), "b": torch.ones(2)}}
    for load in (lambda: open_store(tmp_path).load(found, tensors), lambda: Store.load_full(found)):
        with pytest.raises(UserError) as caught:
            load()
        assert message in str(caught.value)
    assert not (found.path / "executed").exists()


def test_an_index_of_any_python(tmp_path: Path) -> None:
    """3.11.0 to 3.11.3 pickle members of an enumeration as attributes."""

    def as_attributes(folder: Path) -> None:
        index = pickle.loads((folder / ".metadata").read_bytes())
        with (folder / ".metadata").open("wb") as file:
            pickler = pickle.Pickler(file)
            kind = dcp_metadata._MEM_FORMAT_ENCODING
            pickler.dispatch_table = copyreg.dispatch_table | {
                kind: lambda member: (getattr, (kind, member.name))
            }
            pickler.dump(index)

    found = forged(tmp_path, as_attributes)
    assert b"getattr" in (found.path / ".metadata").read_bytes()
    tensors = {"model": {"a": torch.ones(2), "b": torch.ones(2)}}
    open_store(tmp_path).load(found, tensors)
    assert not tensors["model"]["a"].any()
