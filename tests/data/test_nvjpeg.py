from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data import nvjpeg
from lockstep.data.decode import decode, size_for_gpu
from lockstep.data.nvjpeg import NvJpeg, NvJpegError, share_for_gpu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("cpu", "gpu", "share"),
    [
        pytest.param(1400.0, 3900.0, 1.0, id="few cores"),  # 58 % by their pace: measured, too many
        pytest.param(2000.0, 4000.0, 0.5, id="as many each"),
        pytest.param(3000.0, 4000.0, 0.4, id="some cores"),
        pytest.param(4000.0, 4000.0, 0.33, id="at the edge"),
        pytest.param(6000.0, 4000.0, 0.0, id="enough cores"),
        pytest.param(1000.0, 0.0, 0.0, id="nothing it can decode"),
        pytest.param(0.0, 0.0, 0.0, id="nothing at all"),
    ],
)
def test_share_for_gpu(cpu: float, gpu: float, share: float) -> None:
    assert share_for_gpu(cpu, gpu) == pytest.approx(share, abs=0.005)


def test_without_the_library(monkeypatch: Any) -> None:
    monkeypatch.setattr(nvjpeg.ctypes, "CDLL", lambda _: (_ for _ in ()).throw(OSError))
    with pytest.raises(NvJpegError, match="pip install nvidia-nvjpeg"):
        nvjpeg._load()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("subsampling", "mean", "most"), [(0, 0.0, 1), (1, 1.0, 15), (2, 1.0, 15)], ids=str
)
def test_pixels(
    picture: Callable[..., Image.Image], subsampling: int, mean: float, most: int
) -> None:
    files = []
    for i in range(20):
        file = io.BytesIO()
        # Large beside its spots of colour: decoders differ in how they enlarge halved colours.
        picture(490 + 7 * i, 650 - 5 * i).save(file, "JPEG", quality=90, subsampling=subsampling)
        files.append(file.getvalue())
    sizes: Any = [size_for_gpu(data, exif_rotate=True) for data in files]
    decoder = NvJpeg(torch.device("cuda"))
    for _ in range(2):
        for data, image in zip(files, decoder.decode(files, sizes), strict=True):
            difference = abs(image.cpu().numpy().astype(int) - decode(data, exif_rotate=True))
            assert np.mean(difference) <= mean and difference.max() <= most


@pytest.mark.gpu
@needs_gpu
def test_what_it_refuses_does_not_harm_what_follows(picture: Callable[..., Image.Image]) -> None:
    file = io.BytesIO()
    picture(90, 70).save(file, "JPEG", subsampling=0)
    good, decoder = file.getvalue(), NvJpeg(torch.device("cuda"))
    with pytest.raises(NvJpegError):
        decoder.decode([good, b"no image"], [(70, 90), (70, 90)])
    (image,) = decoder.decode([good], [(70, 90)])
    np.testing.assert_array_equal(image.cpu().numpy(), decode(good, exif_rotate=True))
