"""FSDP2 (``fully_shard``): parameters, gradients and optimiser state sharded over processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep import dist
from lockstep.models.build import blocks
from lockstep.models.deferred import fill, is_deferred
from lockstep.strategy.base import Strategy
from lockstep.strategy.precision import autocast_dtype


class FSDPStrategy(Strategy):
    """Zhao et al. 2023 (arXiv:2304.11277), per-parameter sharding; ``hsdp`` on a 2-D mesh.

    ``shard=full`` gathers a block's parameters for forward and again for backward; ``grad_op``
    keeps them from forward to backward; ``none`` replicates everything.
    """

    materialises_meta: ClassVar[bool] = True
    sends_in_pass: ClassVar[bool] = True

    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        model = self._sync_batchnorm(model)
        deferred = is_deferred(model)
        host_state, host_buffers = (None, {}) if deferred else self._host_copy(model)
        home = torch.device("cpu") if self.cfg.cpu_offload else device
        if host_state is None and not deferred:
            model.to(home)
        options: dict[str, Any] = {
            "mesh": self._mesh(device),
            "mp_policy": self._mixed_precision(model),
            "offload_policy": self._offload(device),
            "reshard_after_forward": self.cfg.shard == "full",
        }
        wrapped = blocks(model) if self.cfg.wrap == "block" else []
        for block in wrapped:
            fully_shard(block, **options)
        # The root's parameters are needed first in backward: regathering them wins nothing.
        fully_shard(model, **options | {"reshard_after_forward": False})
        self._prefetch([m for m in wrapped if isinstance(m, FSDPModule)])
        if host_state is not None:
            self._materialise(model, device, host_state, host_buffers)
        else:
            fill(model, home)
            _move_buffers(model, device)
        self._model = model
        return model

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        # Keeping whole gradients until the last micro-batch saves communication but holds a
        # model-sized buffer: right where memory is not the point.
        root = self._model
        assert isinstance(root, FSDPModule)
        if self.cfg.shard == "full":
            root.set_requires_all_reduce(last)
        else:
            root.set_requires_gradient_sync(last)
        # A recorded pass must not end with sends under way.
        root.set_is_last_backward(last or self.recorded)
        yield

    def after_evaluation(self) -> None:
        # Backward would free what forward gathered. Left gathered, the modules hold copies that
        # neither the optimiser nor the moving average knows.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _mesh(self, device: torch.device) -> DeviceMesh:
        world, shard = dist.world_size(), self.shard_processes
        if shard == world:
            return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
        return init_device_mesh(
            device.type, (world // shard, shard), mesh_dim_names=("replicate", "shard")
        )

    def _offload(self, device: torch.device) -> OffloadPolicy:
        if not self.cfg.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=device.type == "cuda")

    def _mixed_precision(self, model: nn.Module) -> MixedPrecisionPolicy:
        dtype = autocast_dtype(self.precision)
        # BatchNorm kernels refuse half-precision weights beside fp32 statistics; autocast alone
        # keeps such models right at the price of gathering fp32.
        if dtype is None or any(isinstance(m, _BatchNorm) for m in model.modules()):
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    def _prefetch(self, wrapped: list[FSDPModule]) -> None:
        """Gather ``cfg.prefetch`` blocks ahead; 1 is what FSDP2 does by itself."""
        if self.cfg.prefetch <= 1:
            return
        for i, block in enumerate(wrapped):
            block.set_modules_to_forward_prefetch(wrapped[i + 1 : i + 1 + self.cfg.prefetch])
            ahead = wrapped[max(0, i - self.cfg.prefetch) : i][::-1]
            block.set_modules_to_backward_prefetch(ahead)

    def _host_copy(
        self, model: nn.Module
    ) -> tuple[dict[str, torch.Tensor] | None, dict[str, torch.Tensor]]:
        """With ``meta_init``: rank 0's weights and buffers, and every rank's model on meta."""
        if not self.cfg.meta_init:
            return None, {}
        main = dist.is_main()
        state = dict(model.state_dict()) if main else {}
        buffers = dict(model.named_buffers()) if main else {}
        if main:
            model.to("meta")
        return state, buffers

    def _materialise(
        self,
        model: nn.Module,
        device: torch.device,
        state: dict[str, torch.Tensor],
        buffers: dict[str, torch.Tensor],
    ) -> None:
        """Give every rank its shard of rank 0's weights. All ranks enter here."""
        model.to_empty(device="cpu" if self.cfg.cpu_offload else device)
        set_model_state_dict(
            model,
            dict(state),
            options=StateDictOptions(
                full_state_dict=True,
                broadcast_from_rank0=True,
                cpu_offload=self.cfg.cpu_offload,
            ),
        )
        # A state dict leaves non-persistent buffers out (rope tables, relative positions).
        _move_buffers(model, device)
        for name, buffer in model.named_buffers():
            if dist.is_main():
                buffer.copy_(buffers[name])
            dist.broadcast_(buffer)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """CPU offload moves parameters for each use, but buffers have to be where the work is."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
