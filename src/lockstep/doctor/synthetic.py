"""The same random images again and again, as a loader gives them; loaders that know when it is enough."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lockstep import dist
from lockstep.config.plan import Plan
from lockstep.config.schema import Config
from lockstep.data.loader import Batch, Loader
from lockstep.data.mixing import is_mixed
from lockstep.data.sampler import MicroSlice, sample_seeds
from lockstep.errors import Stopped


class Measured(Stopped):
    """Enough steps are done: the run ends like one that was asked to stop."""


def images_and_targets(
    config: Config, plan: Plan, count: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """[count, 3, S, S] float32, channels last on CUDA; targets as ``augment`` makes them.

    [count] int64, or [count, classes] float32 where samples are mixed.
    """
    random = torch.Generator().manual_seed(config.seed + dist.rank())
    images = torch.randn(count, 3, plan.image_size, plan.image_size, generator=random).to(device)
    if device.type == "cuda":
        images = images.to(memory_format=torch.channels_last)
    targets = torch.randint(plan.data.num_classes, (count,), generator=random).to(device)
    if is_mixed(config.augment):
        return images, torch.nn.functional.one_hot(targets, plan.data.num_classes).float()
    return images, targets


def ask_between_steps(loader: Loader, accumulation: int, enough: Callable[[], bool]) -> None:
    """Have ``loader.batches`` raise Measured instead of the step that is one too many."""
    batches = loader.batches

    def asking(epoch: int, slices: Iterable[MicroSlice]) -> Generator[Batch, None, None]:
        stream = batches(epoch, slices)
        try:
            for number, batch in enumerate(stream):
                if number % accumulation == 0 and enough():
                    raise Measured
                yield batch
        finally:
            stream.close()

    vars(loader)["batches"] = asking


@dataclass(frozen=True)
class NoImages:
    """A source of as many samples as asked for, none of which can be read."""

    count: int
    classes: list[str]
    digest: str = "synthetic"
    folder: Path = Path("synthetic")

    @property
    def targets(self) -> np.ndarray:
        return np.zeros(self.count, np.int64)

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"synthetic/{index}"

    def path(self, index: int) -> Path:
        return Path(self.name(index))

    def read(self, index: int) -> bytes:
        raise OSError("synthetic")

    def will_read(self, indices: np.ndarray) -> None:
        pass


class SyntheticLoader(Loader):
    """Costs nothing, and asks between two steps whether it is enough."""

    def __init__(
        self, config: Config, plan: Plan, device: torch.device, enough: Callable[[], bool]
    ) -> None:
        # Not the base's: it starts workers and opens files.
        self.source = NoImages(plan.data.num_train, [str(i) for i in range(plan.data.num_classes)])
        self.skipped, self.wait_seconds, self.gpu_share = {}, 0.0, 0.0
        self.device = device
        self._config, self._plan, self._enough = config, plan, enough
        self._parts: dict[int, tuple[torch.Tensor, ...]] = {}

    @property
    def stops_on_error(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is open."""

    def batches(self, epoch: int, slices: Iterable[MicroSlice]) -> Generator[Batch, None, None]:
        """As :meth:`Loader.batches`. Raises Measured instead of the step that is one too many."""
        for number, piece in enumerate(slices):
            if number % self._plan.accumulation == 0 and self._enough():
                raise Measured
            ids = np.arange(piece.start, max(piece.stop, piece.start + 1))
            if len(ids) not in self._parts:
                self._parts[len(ids)] = self._make(ids)
            images, targets, weights, seeds = self._parts[len(ids)]
            dummy = piece.start == piece.stop
            yield Batch(
                images=images,
                targets=targets,
                weights=torch.zeros_like(weights) if dummy else weights,
                seeds=seeds,
                seeds_host=ids,
                ids=ids[:0] if dummy else ids,
                slice=piece,
            )

    def _make(self, ids: np.ndarray) -> tuple[torch.Tensor, ...]:
        images, targets = images_and_targets(self._config, self._plan, len(ids), self.device)
        seeds = torch.from_numpy(sample_seeds(self._config.seed, 0, ids)).to(self.device)
        return images, targets, torch.ones(len(ids), device=self.device), seeds
