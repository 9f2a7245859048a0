"""From a file's bytes to 8-bit RGB, or a reason why not. Level 2; the only file that opens images.

JPEGs of one or three 8-bit components are decoded by simplejpeg, straight into an array; whatever
it does not like, and everything else, by Pillow. Where only a part is wanted, nvImageCodec decodes
no more than that. All are libjpeg-turbo: the pixels are the same.
The rules, the same for every format:

- the first frame or page of several;
- the EXIF orientation is applied if wanted (that of TIFF, which is no EXIF but part of the format,
  always); an EXIF block that cannot be read counts as none;
- transparency is dropped and the stored colour shown, as torchvision and timm do;
- 16-bit values keep their high byte, as Pillow does for colour; float grey within 0..1 becomes
  0..255; other 32-bit values have no defined white and are stretched from least to largest;
- CMYK and the like are converted by Pillow;
- an empty, truncated or broken file is refused, and so is one of more than twice Pillow's
  ``MAX_IMAGE_PIXELS`` (179 million pixels).
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock, local
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

# Threads decode at the same time, so a filter around each call is not possible. What Pillow warns
# of (odd EXIF, large images) is either handled here or refused by name.
warnings.filterwarnings("ignore", module=r"PIL\.")

Image.init()
# Not all that Pillow knows: EPS, for one, would start Ghostscript.
_WANTED = ("JPEG", "MPO", "PNG", "BMP", "DIB", "GIF", "WEBP", "AVIF", "TIFF", "PPM", "JPEG2000")
FORMATS = tuple(name for name in _WANTED if name in Image.OPEN)
"""Pillow's names of what is opened at all."""
ORIENTATION_TAG = 0x0112
_APP1, _APP14 = 0xE1, 0xEE
_END_OF_IMAGE = b"\xff\xd9"
_START_OF_SCAN = 0xDA
_START_OF_FRAME = (0xC0, 0xC1, 0xC2)
"""Baseline, extended and progressive; the others are for Pillow."""
_NO_LENGTH = (0x00, 0x01, *range(0xD0, 0xDA))
_YCBCR = b"\x01\x02\x03"
_GPU_SAMPLING = (b"\x11\x11\x11", b"\x21\x11\x11", b"\x22\x11\x11")
"""4:4:4, 4:2:2, 4:2:0."""
_GPU_LEAST_SIDE = 32
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class DecodeError(Exception):
    """The bytes are no image that can be shown whole; the message says why, on one line."""


def decode(data: bytes, *, exif_rotate: bool) -> np.ndarray:
    """Decode one image; safe to call from several threads.

    Args:
        data: a whole file.
        exif_rotate: turn the image as its EXIF orientation says.

    Returns:
        [height, width, 3] uint8, RGB.

    Raises:
        DecodeError: by the rules of this module.
    """
    if _is_simple_jpeg(data, exif_rotate=exif_rotate):
        # Strict: it must not go on silently where Pillow would refuse.
        with suppress(ValueError, MemoryError):
            pixels: np.ndarray = simplejpeg.decode_jpeg(data, strict=True)
            return pixels
    with _opened(data) as image:
        image.load()
        rgb = _to_rgb(image)
        turn = TURNS.get(orientation(image)) if exif_rotate else None
    return np.array(rgb if turn is None else rgb.transpose(turn))  # writable, as torch wants it


def header_problem(data: bytes) -> str | None:
    """Why :func:`decode` will refuse a file, where its header shows that already."""
    if not _is_simple_jpeg(data, exif_rotate=False):
        try:
            with _opened(data):
                pass
        except DecodeError as error:
            return str(error)
    return None


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """An image by Pillow; what goes wrong with it becomes a DecodeError."""
    if not data:
        raise DecodeError("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:
        raise DecodeError("not an image of a known format") from error
    except Image.DecompressionBombError as error:
        raise DecodeError(f"too large: {str(error).partition(',')[0]}") from error
    except Exception as error:  # Pillow's readers raise whatever a damaged field trips over
        raise DecodeError(" ".join(str(error).split()) or type(error).__name__) from error


@dataclass(frozen=True, slots=True)
class _Jpeg:
    """What stands before the pixels of a JPEG of one frame of 8-bit components."""

    height: int
    width: int
    baseline: bool
    components: bytes
    """Three bytes each: number, sampling factors, table."""
    described: bool
    """Whether there is EXIF or XMP, either of which may hold an orientation."""
    adobe: int | None
    """The colour transform that Adobe's marker names."""


def jpeg_size(data: bytes, *, exif_rotate: bool) -> tuple[int, int] | None:
    """Height and width of a JPEG that :func:`decode_part` may be asked for, else None."""
    jpeg = _read_jpeg(data)
    # A truncated one must not pass because its end is not looked at.
    if jpeg is None or not data.endswith(_END_OF_IMAGE):
        return None
    return (jpeg.height, jpeg.width) if _is_simple(jpeg, data, exif_rotate) else None


def decode_part(data: bytes, box: tuple[int, int, int, int]) -> np.ndarray | None:
    """Decode the pixels within a box alone, in about two thirds of the time.

    Args:
        data: what has a :func:`jpeg_size`.
        box: left, top, right, bottom in pixels; right and bottom are outside.

    Returns:
        [bottom - top, right - left, 3] uint8, as :func:`decode` has them there; None where the image
        must be decoded whole, and perhaps refused.
    """
    if not hasattr(_own, "parts"):
        _own.parts = _part_decoder()
    if _own.parts is None:
        return None
    codec, decoder, params = _own.parts
    left, top, right, bottom = box
    try:
        stream = codec.CodeStream(data)
        part = stream.get_sub_code_stream(region=codec.Region(top, left, bottom, right))
        image = decoder.decode(part, params=params)
    except RuntimeError:
        return None
    return None if image is None else np.asarray(image.cpu())


def _part_decoder() -> tuple[Any, Any, Any] | None:
    """nvImageCodec, told to use the CPU; None where it is not installed (it exists for Linux)."""
    with _quiet():  # it names each of its own plug-ins that finds no library
        try:
            from nvidia import nvimgcodec as codec

            decoder = codec.Decoder(
                device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
                max_num_cpu_threads=1,
                backends=[codec.Backend(codec.BackendKind.CPU_ONLY)],
            )
            params = codec.DecodeParams(
                apply_exif_orientation=False, color_spec=codec.ColorSpec.SRGB
            )
        except Exception:  # noqa: BLE001 - absent, or another version: it only saves time
            return None
    return codec, decoder, params


@contextmanager
def _quiet() -> Iterator[None]:
    """What libraries write past Python to the error stream is lost meanwhile."""
    with _quiet_lock:
        kept = os.dup(2)
        try:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


_quiet_lock = Lock()
_own = local()
"""A decoder of parts for each thread."""


def _read_jpeg(data: bytes) -> _Jpeg | None:
    """None for what only Pillow shall judge: no JPEG, or an unusual one."""
    position, described = 2, False
    adobe: int | None = None
    frames: list[tuple[int, int]] = []
    """Marker and position of each."""
    if data[:2] != b"\xff\xd8":
        return None
    while position + 10 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # padding
            position += 1
            continue
        if marker == _START_OF_SCAN:
            break
        if marker in _NO_LENGTH:  # out of place here, and libjpeg goes on behind it
            return None
        if marker == _APP1:
            described = True
        if marker == _APP14 and data[position + 4 : position + 9] == b"Adobe":
            adobe = data[position + 15] if position + 15 < len(data) else None
        if marker in _START_OF_FRAME:
            frames.append((marker, position))
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    else:
        return None
    if len(frames) != 1:
        return None
    marker, at = frames[0]
    count = data[at + 9]
    if data[at + 4] != 8 or count not in (1, 3):
        return None
    return _Jpeg(
        height=int.from_bytes(data[at + 5 : at + 7], "big"),
        width=int.from_bytes(data[at + 7 : at + 9], "big"),
        baseline=marker == _START_OF_FRAME[0],
        components=data[at + 10 : at + 10 + 3 * count],
        described=described,
        adobe=adobe,
    )


def _is_simple_jpeg(data: bytes, *, exif_rotate: bool) -> bool:
    """Whether simplejpeg shows what Pillow would: size, components, and nothing to turn."""
    jpeg = _read_jpeg(data)
    return jpeg is not None and _is_simple(jpeg, data, exif_rotate)


def _is_simple(jpeg: _Jpeg, data: bytes, exif_rotate: bool) -> bool:
    fits = 0 < jpeg.height * jpeg.width <= 2 * (Image.MAX_IMAGE_PIXELS or 0)
    return fits and not (jpeg.described and exif_rotate and _is_turned(data))


def size_for_gpu(data: bytes, *, exif_rotate: bool) -> tuple[int, int] | None:
    """Height and width, if a GPU's decoder shows the same: a whole baseline JPEG of usual colours."""
    jpeg = _read_jpeg(data)
    suits = (
        jpeg is not None
        and jpeg.baseline
        and min(jpeg.height, jpeg.width) >= _GPU_LEAST_SIDE
        and jpeg.height * jpeg.width <= (Image.MAX_IMAGE_PIXELS or 0)
        and jpeg.components[::3] == _YCBCR
        and jpeg.components[1::3] in _GPU_SAMPLING
        and jpeg.adobe != 0
        # A truncated one is grey at its end, and that must not go on silently.
        and data.endswith(_END_OF_IMAGE)
        and not (jpeg.described and exif_rotate and _is_turned(data))
    )
    return (jpeg.height, jpeg.width) if jpeg is not None and suits else None


def _is_turned(data: bytes) -> bool:
    with suppress(Exception), Image.open(io.BytesIO(data), formats=("JPEG", "MPO")) as image:
        return orientation(image) in TURNS
    return True  # Pillow shall decide


def _to_rgb(image: Image.Image) -> Image.Image:
    image.info.pop("transparency", None)
    if image.mode.startswith(("I", "F")):
        image = Image.fromarray(_to_8_bit(np.asarray(image)))
    return image.convert("RGB")


def _to_8_bit(grey: np.ndarray) -> np.ndarray:
    if grey.dtype.kind == "f":
        finite = np.isfinite(grey)
        grey = np.where(finite, grey, grey[finite].min() if finite.any() else 0)
    least, largest = grey.min(), grey.max()
    if grey.dtype.kind != "f" and least >= 0 and largest < 1 << 16:
        return (grey.astype(np.uint16) >> 8).astype(np.uint8)
    if grey.dtype.kind == "f" and least >= 0 and largest <= 1:
        least, largest = 0, 1
    span = max(float(largest) - float(least), np.finfo(np.float64).tiny)
    return np.rint((grey.astype(np.float64) - float(least)) / span * 255).astype(np.uint8)


def orientation(image: Image.Image) -> int:
    """EXIF's number for how the image is turned; 1: not at all."""
    with suppress(Exception):  # as above; an image is worth more than its EXIF
        return int(image.getexif().get(ORIENTATION_TAG, 1))
    return 1
