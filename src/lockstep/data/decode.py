"""From a file's bytes to 8-bit RGB, or a reason why not. Level 2; the only file that opens images.

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
import warnings
from contextlib import suppress

import numpy as np
from PIL import Image, UnidentifiedImageError

# Threads decode at the same time, so a filter around each call is not possible. What Pillow warns
# of (odd EXIF, large images) is either handled here or refused by name.
warnings.filterwarnings("ignore", module=r"PIL\.")

Image.init()
# Not all that Pillow knows: EPS, for one, would start Ghostscript.
_WANTED = ("JPEG", "MPO", "PNG", "BMP", "DIB", "GIF", "WEBP", "AVIF", "TIFF", "PPM", "JPEG2000")
_FORMATS = tuple(name for name in _WANTED if name in Image.OPEN)
_ORIENTATION_TAG = 0x0112
_TURNS = {
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


def decode(data: bytes, *, exif_rotate: bool) -> Image.Image:
    """Decode one image; safe to call from several threads.

    Args:
        data: a whole file.
        exif_rotate: turn the image as its EXIF orientation says.

    Returns:
        A loaded image of mode RGB, 8 bits a channel.

    Raises:
        DecodeError: by the rules of this module.
    """
    if not data:
        raise DecodeError("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            image.load()
            rgb = _to_rgb(image)
            turn = _TURNS.get(_orientation(image)) if exif_rotate else None
    except UnidentifiedImageError as error:
        raise DecodeError("not an image of a known format") from error
    except Image.DecompressionBombError as error:
        raise DecodeError(f"too large: {str(error).partition(',')[0]}") from error
    except Exception as error:  # Pillow's readers raise whatever a damaged field trips over
        raise DecodeError(" ".join(str(error).split()) or type(error).__name__) from error
    return rgb if turn is None else rgb.transpose(turn)


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


def _orientation(image: Image.Image) -> int:
    with suppress(Exception):  # as above; an image is worth more than its EXIF
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    return 1
