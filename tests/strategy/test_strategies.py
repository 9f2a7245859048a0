"""Every strategy gives the exact gradient and norm, on gloo processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lockstep import dist
from lockstep.config.schema import Model
from lockstep.data.sampler import num_micro_batches, window_slices
from lockstep.engine.step import StepSums, micro_step
from lockstep.models.build import build
from lockstep.strategy import STRATEGIES
from lockstep.strategy.ddp import DDPStrategy
from lockstep.strategy.fsdp import FSDPStrategy
from tests.pool import on_group
from tests.toys import CPU, batch_of, network, nowhere, precision, state_of, strategy_of

IMAGES = torch.randn(20, 3, 4, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(5, (20,), generator=torch.Generator().manual_seed(1))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference() -> tuple[dict[str, torch.Tensor], float, float]:
    """One big batch, torch alone: gradients, loss and gradient norm."""
    model = network()
    loss = nn.functional.cross_entropy(model(IMAGES), TARGETS, label_smoothing=0.1)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    return grads, loss.item(), norm


def check_gradient(name: str, shard: str, micro: int | None) -> None:
    name, _, how = name.partition(" ")
    world, rank = dist.world_size(), dist.rank()
    shard_processes = {"fsdp": 1 if shard == "none" else world, "hsdp": world // 2}.get(name, 1)
    slices = window_slices(0, len(IMAGES), micro, rank, world)
    model = network()
    state, strategy = state_of(
        model,
        strategy_of(
            name,
            shard=shard,
            reduce="after" if how == "after" else "backward",
            wrap="model" if how == "wrap=model" else "block",
            shard_processes=shard_processes,
            accumulation=len(slices),
        ),
    )
    grads, loss, norm = reference()
    for _ in range(2):  # the second time nothing of the first may be left
        sums = StepSums.on(CPU)
        for i, piece in enumerate(slices):
            micro_step(
                state,
                strategy,
                precision(),
                batch_of(IMAGES, TARGETS, piece),
                sums,
                window=len(IMAGES),
                last=i == len(slices) - 1,
                label_smoothing=0.1,
                graphs=None,
                enter=nowhere,
            )
        strategy.reduce_gradients(list(model.parameters()))
        found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close(found, grads, rtol=1e-4, atol=1e-6)
        assert float(strategy.grad_norm(list(model.parameters()))) == pytest.approx(norm, rel=1e-5)
        assert float(dist.all_reduce_sum_(sums.loss)) / len(IMAGES) == pytest.approx(loss, rel=1e-5)
        assert dist.all_reduce_sum_(torch.tensor(sums.samples)).item() == len(IMAGES)
        state.optimizer.zero_grad(set_to_none=True)
        state.statistics.end_window(num_micro_batches(0, len(IMAGES), micro, world))


CASES = [
    pytest.param(1, "single", "none", None, id="single"),
    pytest.param(1, "single", "none", 6, id="single accumulates"),
    pytest.param(1, "dp", "none", None, id="dp"),
    pytest.param(2, "ddp", "none", None, id="ddp"),
    pytest.param(3, "ddp", "none", None, id="ddp, 7 + 7 + 6"),
    pytest.param(3, "ddp", "none", 4, id="ddp accumulates, some idle"),
    pytest.param(1, "ddp after", "none", 6, id="ddp alone, after, accumulates"),
    pytest.param(3, "ddp after", "none", None, id="ddp after, 7 + 7 + 6"),
    pytest.param(3, "ddp after", "none", 4, id="ddp after accumulates, some idle"),
    pytest.param(3, "fsdp", "full", None, id="fsdp, 7 + 7 + 6"),
    pytest.param(3, "fsdp", "full", 4, id="fsdp accumulates, some idle"),
    pytest.param(3, "fsdp", "grad_op", 4, id="fsdp grad_op accumulates, some idle"),
    pytest.param(3, "fsdp wrap=model", "grad_op", None, id="fsdp wrap=model, 7 + 7 + 6"),
    pytest.param(3, "fsdp wrap=model", "grad_op", 4, id="fsdp wrap=model accumulates, some idle"),
    pytest.param(2, "fsdp", "none", 6, id="fsdp none accumulates"),
    pytest.param(4, "hsdp", "full", 3, id="hsdp accumulates"),
    pytest.param(4, "hsdp", "grad_op", 3, id="hsdp grad_op accumulates"),
    pytest.param(4, "hsdp", "full", None, id="hsdp"),
]


@pytest.mark.parametrize("world, name, shard, micro", CASES)
def test_exact_gradient(pool: Any, world: int, name: str, shard: str, micro: int | None) -> None:
    if world == 1:
        check_gradient(name, shard, micro)
    else:
        pool(world, on_group, check_gradient, name, shard, micro)


def test_the_table_knows_every_name_but_auto() -> None:
    assert sorted(STRATEGIES) == ["ddp", "dp", "fsdp", "hsdp", "single"]


# --- ddp --------------------------------------------------------------------------------------


def check_ddp(accumulation: int) -> tuple[bool, bool]:
    strategy = strategy_of("ddp", accumulation=accumulation)
    module = strategy.prepare(network(batchnorm=True), CPU)
    assert isinstance(strategy, DDPStrategy)
    assert isinstance(module, nn.parallel.DistributedDataParallel)
    with strategy.micro_batch(last=False):
        waits = not module.require_backward_grad_sync
    with strategy.micro_batch(last=True):
        assert module.require_backward_grad_sync
    sent = getattr(module, "broadcast_buffers", getattr(module, "forward_sync_buffers", None))
    assert not sent, "the running statistics are each rank's own"
    return bool(module.static_graph), waits


@pytest.mark.parametrize("accumulation, static", [(1, True), (2, False)])
def test_ddp(pool: Any, accumulation: int, static: bool) -> None:
    assert pool(2, on_group, check_ddp, accumulation) == [(static, True)] * 2


def check_same_start() -> list[float]:
    torch.manual_seed(dist.rank())
    model = network(batchnorm=True)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(dist.rank())
    strategy_of("ddp", reduce="after").prepare(model, CPU)
    return [float(t.double().sum()) for t in model.state_dict().values()]


def test_ddp_starts_everywhere_from_the_weights_of_rank_0(pool: Any) -> None:
    first, second = pool(2, on_group, check_same_start)
    assert first == second


def test_ddp_alone_wraps_nothing() -> None:
    model = network()
    assert strategy_of("ddp").prepare(model, CPU) is model


# --- synchronised BatchNorm -------------------------------------------------------------------


def test_synchronised_batchnorm_keeps_activations() -> None:
    """timm's BatchNorm layers hold the activation that follows."""
    model = timm.create_model("regnety_002", num_classes=5)
    before = [m.act for m in model.modules() if isinstance(m, BatchNormAct2d)]
    model = strategy_of("ddp", sync_batchnorm=True).prepare(model, CPU)
    after = [m.act for m in model.modules() if isinstance(m, SyncBatchNormAct)]
    assert before and after == before
    assert not any(isinstance(m, BatchNormAct2d) for m in model.modules())


def test_batchnorm_stays_as_it_is_unless_asked() -> None:
    model = strategy_of("ddp").prepare(network(batchnorm=True), CPU)
    assert any(type(m) is nn.BatchNorm2d for m in model.modules())


# --- fsdp -------------------------------------------------------------------------------------


def tiny(name: str, *, meta: bool, size: int = 32, **changes: Any) -> nn.Module:
    values: dict[str, Any] = {
        "name": name,
        "pretrained": False,
        "image_size": None,
        "patch_size": None,
        "drop_path": 0.2,
        "activation_checkpointing": False,
        "draw": "model",
        "kwargs": {},
    }
    cfg = Model(**(values | changes))
    return build(cfg, image_size=size, num_classes=5, seed=0, meta=meta)


MODELS: dict[str, dict[str, Any]] = {
    "rope": {
        "name": "eva02_tiny_patch14_224",
        "size": 28,
        "kwargs": {"depth": 2, "embed_dim": 48, "num_heads": 4},
    },
    "rope of dinov3": {
        "name": "vit_small_patch16_dinov3",
        "kwargs": {"depth": 2, "embed_dim": 48, "num_heads": 4},
    },
    "relative positions": {
        "name": "swin_tiny_patch4_window7_224",
        "kwargs": {"embed_dim": 24, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
    },
    "batchnorm": {"name": "test_resnet"},
}


def check_meta_init(kind: str, offload: bool) -> None:
    """The model after ``prepare`` is the one that a normal start builds, on every rank."""
    images = torch.randn(2, 3, MODELS[kind].get("size", 32), MODELS[kind].get("size", 32))
    normal = tiny(**MODELS[kind], meta=False)
    model = tiny(**MODELS[kind], meta=not dist.is_main())
    strategy = strategy_of(
        "fsdp", shard_processes=dist.world_size(), meta_init=True, cpu_offload=offload
    )
    strategy.prepare(model, CPU)
    weights = {n: whole(p.detach()) for n, p in model.named_parameters()}
    torch.testing.assert_close(weights, dict(normal.named_parameters()), rtol=0, atol=0)
    buffers, expected = dict(model.named_buffers()), dict(normal.named_buffers())
    torch.testing.assert_close(buffers, expected, rtol=0, atol=0)
    assert len(expected) > len([n for n in normal.state_dict() if n in expected]), (
        "the test means buffers that a state dict leaves out"
    )
    torch.testing.assert_close(model.eval()(images), normal.eval()(images))


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("kind", MODELS)
def test_meta_init(pool: Any, kind: str, offload: bool) -> None:
    pool(2, on_group, check_meta_init, kind, offload)


def check_evaluation(shard: str) -> None:
    """What the optimiser changes after an evaluation is what the next evaluation sees."""
    world = dist.world_size()
    model = network()
    shard_processes = 1 if shard == "none" else world
    state, strategy = state_of(
        model, strategy_of("fsdp", shard=shard, shard_processes=shard_processes)
    )
    with torch.no_grad():
        before = state.module(IMAGES)
        strategy.after_evaluation()
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.mul_(2.0)
        after = state.module(IMAGES)
        strategy.after_evaluation()
        doubled = network()
        for parameter in doubled.parameters():
            parameter.mul_(2.0)
        torch.testing.assert_close(after, doubled(IMAGES))
    assert not torch.equal(before, after)
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("shard", ["full", "grad_op", "none"])
def test_after_evaluation_nothing_stays_gathered(pool: Any, shard: str) -> None:
    pool(2, on_group, check_evaluation, shard)


def groups(wrap: str) -> list[str]:
    """What is gathered by itself."""
    strategy = strategy_of("fsdp", shard="grad_op", wrap=wrap, shard_processes=dist.world_size())
    module = strategy.prepare(tiny("vit_tiny_patch16_224", meta=False), CPU)
    return [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]


def test_what_is_gathered_as_one(pool: Any) -> None:
    blocks, model = (pool(2, on_group, groups, wrap)[0] for wrap in ("block", "model"))
    assert model == [""]
    assert blocks == ["", *(f"blocks.{i}" for i in range(len(blocks) - 1))] and len(blocks) > 2


def sends_are_waited_for(recorded: bool) -> list[bool]:
    """Of a step's two micro-batches, whether backward ends with nothing under way."""
    strategy = strategy_of(
        "fsdp", shard="full", shard_processes=dist.world_size(), recorded=recorded
    )
    module = strategy.prepare(network(), CPU)
    found = []
    for last in (False, True):
        with strategy.micro_batch(last=last):
            module(IMAGES).sum().backward()
        found.append(bool(module._get_fsdp_state()._state_ctx.is_last_backward))
    return found


def test_a_recorded_pass_ends_with_no_send_under_way(pool: Any) -> None:
    assert pool(2, on_group, sends_are_waited_for, False) == [[False, True]] * 2
    assert pool(2, on_group, sends_are_waited_for, True) == [[True, True]] * 2


def check_policies() -> list[str]:
    plain, normed = network(), network(batchnorm=True)
    strategy = strategy_of("fsdp", shard_processes=1, number_format=precision("bf16"))
    assert isinstance(strategy, FSDPStrategy)
    return [str(strategy._mixed_precision(m).param_dtype) for m in (plain, normed)]


def test_half_precision_policy() -> None:
    """BatchNorm under a half-precision policy fails; autocast alone carries such models."""
    assert check_policies() == ["torch.bfloat16", "None"]


def check_forward(name: str, size: int) -> None:
    """Odd ways of repeating blocks under FSDP: one step, against the plain model."""
    model, plain = (tiny(name, size=size, drop_path=0.0, meta=False) for _ in range(2))
    strategy = strategy_of("fsdp", shard_processes=dist.world_size())
    module = strategy.prepare(model, CPU)
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    for net in (module, plain):
        with strategy.micro_batch(last=True):
            net(images).square().mean().backward()
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "name, size",
    [
        pytest.param("densenet121", 64, id="densenet"),
        pytest.param("levit_128s", 224, id="levit"),
        pytest.param("cait_xxs24_224", 224, id="cait"),
        pytest.param("convnext_atto", 64, id="convnext"),
        pytest.param("efficientnet_b0", 64, id="efficientnet"),
        pytest.param("dla46_c", 64, id="no blocks at all"),
    ],
)
@pytest.mark.slow
def test_other_architectures(pool: Any, name: str, size: int) -> None:
    pool(2, on_group, check_forward, name, size)
