from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.data import decode as decode_module
from lockstep.data.decode import DecodeError, decode, decode_part, jpeg_size, size_for_gpu

# Only here: pytest shows what the room itself keeps silent (test_nothing_is_written_to_stderr).
pytestmark = pytest.mark.filterwarnings("ignore:::PIL")

MESSY = Path(__file__).parents[3] / "shared" / "data" / "messy"

DECODED = {
    "16_bit_noise.tif": (32, 32),
    "Landscape_6.jpg": (1800, 1200),
    "Portrait_8.jpg": (1200, 1800),
    "blend_transparency.png": (1, 1),
    "dispose_bgnd_transparency.gif": (38, 32),
    "exif-dpi-zerodivision.jpg": (200, 200),
    "exif_imagemagick_orientation.png": (512, 512),
    "exif_typeerror.jpg": (800, 531),
    "flower.webp": (480, 360),
    "hopper.bmp": (128, 128),
    "hopper.gif": (128, 128),
    "hopper.ppm": (128, 128),
    "hopper.webp": (128, 128),
    "hopper_16bit_qtables.jpg": (128, 128),
    "hopper_bad_exif.jpg": (500, 500),
    "hopper_gray.jpg": (128, 128),
    "hopper_gray_4bpp.tif": (128, 128),
    "hopper_orientation_3.jpg": (128, 128),
    "hopper_orientation_6.jpg": (128, 128),
    "hopper_orientation_6.webp": (128, 128),
    "imageio16.png": (16, 16),
    "multipage.tiff": (10, 10),
    "pil123p.png": (162, 150),
    "pil_sample_cmyk.jpg": (100, 100),
    "testimgari.jpg": (227, 149),
    "testorig.jpg": (227, 149),
    "transparent.png": (200, 150),
    "truncated_app14.jpg": (100, 100),
}
REFUSED = {
    "broken.png": "not an image",
    "broken_data_stream.png": "unrecognized data stream",
    "decompression_bomb.gif": "too large",
    "truncated_image.png": "truncated",
    "truncated_jpeg.jpg": "truncated",
}
needs_messy = pytest.mark.skipif(not MESSY.is_dir(), reason=f"no real odd images in {MESSY}")


@needs_messy
@pytest.mark.parametrize("name", DECODED)
def test_real_odd_file_is_decoded(name: str) -> None:
    image = decode((MESSY / name).read_bytes(), exif_rotate=True)
    width, height = DECODED[name]
    assert image.dtype == np.uint8 and image.shape == (height, width, 3)


@needs_messy
@pytest.mark.parametrize("name", REFUSED)
def test_real_bad_file_is_refused(name: str) -> None:
    with pytest.raises(DecodeError, match=REFUSED[name]) as caught:
        decode((MESSY / name).read_bytes(), exif_rotate=True)
    assert "\n" not in str(caught.value)


@needs_messy
def test_every_real_file_is_accounted_for() -> None:
    assert {p.name for p in MESSY.iterdir()} == DECODED.keys() | REFUSED.keys()


@needs_messy
def test_nothing_is_written_to_stderr() -> None:
    code = (
        "import sys, pathlib\n"
        "from lockstep.data.decode import DecodeError, decode\n"
        "for path in pathlib.Path(sys.argv[1]).iterdir():\n"
        "    try: decode(path.read_bytes(), exif_rotate=True)\n"
        "    except DecodeError: pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(MESSY)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def pixels(data: bytes, **options: Any) -> np.ndarray:
    return decode(data, **({"exif_rotate": True} | options))


GREY16 = np.array([[0, 255, 256], [32768, 65535, 65280]], dtype=np.uint16)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(
            encode(Image.fromarray(GREY16), "PNG"), [[0, 0, 1], [128, 255, 255]], id="16-bit png"
        ),
        pytest.param(
            encode(Image.fromarray(GREY16), "TIFF"), [[0, 0, 1], [128, 255, 255]], id="16-bit tiff"
        ),
        pytest.param(
            b"P5 2 1 65535\n" + bytes([0x80, 0x00, 0xFF, 0xFF]), [[128, 255]], id="16-bit pgm"
        ),
        pytest.param(
            encode(Image.fromarray(np.array([[0, 0.5, 1]], np.float32)), "TIFF"),
            [[0, 128, 255]],
            id="float 0..1",
        ),
        pytest.param(
            encode(Image.fromarray(np.array([[-10, 30, np.nan]], np.float32)), "TIFF"),
            [[0, 255, 0]],
            id="float wide",
        ),
        pytest.param(
            encode(Image.fromarray(np.full((1, 2), 7e8, np.float32)), "TIFF"),
            [[0, 0]],
            id="float flat",
        ),
        pytest.param(
            encode(Image.fromarray(np.array([[0, 1 << 20, 1 << 21]], np.int32)), "TIFF"),
            [[0, 128, 255]],
            id="32-bit",
        ),
        pytest.param(encode(Image.new("1", (2, 1), 1), "PNG"), [[255, 255]], id="1-bit"),
        pytest.param(encode(Image.new("LA", (1, 1), (90, 0)), "PNG"), [[90]], id="grey alpha"),
        pytest.param(
            encode(Image.new("L", (1, 1), 90), "PNG", transparency=90), [[90]], id="grey key"
        ),
        pytest.param(encode(Image.new("RGBA", (1, 1), (9, 9, 9, 0)), "PNG"), [[9]], id="alpha"),
        pytest.param(encode(Image.new("CMYK", (1, 1)), "TIFF"), [[255]], id="cmyk white"),
    ],
)
def test_modes_become_8_bit(data: bytes, expected: list[list[int]]) -> None:
    rgb = pixels(data)
    assert rgb.dtype == np.uint8
    np.testing.assert_array_equal(rgb, np.repeat(np.array(expected)[..., None], 3, axis=2))


def test_palette_with_transparency_shows_its_colours() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    data = encode(image, "PNG", transparency=b"\x00\x80")
    assert pixels(data).tolist() == [[[10, 20, 30], [40, 50, 60]]]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_several(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert pixels(data)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_exif_orientation(kind: str, orientation: int) -> None:
    upright = np.zeros((16, 24, 3), np.uint8)
    upright[:8, :8] = 255
    upright[8:, :8] = 90
    undo = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    stored = Image.fromarray(upright)
    if undo is not None:
        stored = stored.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(stored, kind, exif=exif)
    assert abs(pixels(data).astype(int) - upright).mean() < 3
    if kind != "TIFF":
        untouched = pixels(data, exif_rotate=False).astype(int)
        assert abs(untouched - np.asarray(stored)).mean() < 3


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0junk"])
def test_bad_exif_counts_as_none(exif: bytes) -> None:
    data = encode(Image.new("RGB", (8, 4)), "JPEG", exif=exif)
    assert decode(data, exif_rotate=True).shape == (4, 8, 3)


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b"hello, I am a text\n" * 9, "not an image", id="text"),
        pytest.param(b"\xff\xd8\xff", "", id="three bytes of a jpeg"),
        pytest.param(encode(Image.fromarray(NOISE), "JPEG")[:900], "truncated", id="half a jpeg"),
        pytest.param(encode(Image.fromarray(NOISE), "PNG")[:900], "truncated", id="half a png"),
        pytest.param(encode(Image.fromarray(NOISE), "WEBP")[:900], "", id="half a webp"),
        pytest.param(encode(Image.fromarray(NOISE), "TIFF")[:900], "", id="half a tiff"),
        pytest.param(encode(Image.fromarray(NOISE), "GIF")[:900], "truncated", id="half a gif"),
        pytest.param(encode(Image.fromarray(NOISE), "BMP")[:900], "truncated", id="half a bmp"),
        pytest.param(b"P6 30000 30000 255\n", "too large", id="bomb"),
        pytest.param(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an", id="eps"),
    ],
)
def test_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(data, exif_rotate=True)
    message = str(caught.value)
    assert message and reason in message and "\n" not in message


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM"])
def test_damage_anywhere_is_an_image_or_a_refusal(kind: str) -> None:
    whole = encode(Image.fromarray(NOISE[:16, :16]), kind)
    rng = np.random.default_rng(1)
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(len(data), size=3):
            data[at] = rng.integers(256)
        try:
            assert decode(bytes(data), exif_rotate=True).shape[2] == 3
        except DecodeError as error:
            assert str(error)


JPEGS: dict[str, dict[str, Any]] = {
    "baseline": {"quality": 90},
    "progressive": {"progressive": True},
    "full colour": {"subsampling": "4:4:4"},
    "half colour": {"subsampling": "4:2:2"},
    "poor": {"quality": 3},
    "restarts": {"restart_marker_rows": 1},
    "optimised": {"optimize": True, "quality": 100},
}


def by_pillow(data: bytes, monkeypatch: pytest.MonkeyPatch) -> np.ndarray | None:
    with monkeypatch.context() as patch:
        patch.setattr(decode_module, "_is_simple_jpeg", lambda *_, **__: False)
        try:
            return decode(data, exif_rotate=True)
        except DecodeError:
            return None


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", JPEGS.values(), ids=JPEGS)
def test_jpegs_are_those_of_pillow(
    options: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(Image.fromarray(NOISE[:61, :37]).convert(mode), "JPEG", **options)
    assert decode_module._is_simple_jpeg(data, exif_rotate=True) == (mode != "CMYK")
    expected = by_pillow(data, monkeypatch)
    assert expected is not None
    np.testing.assert_array_equal(decode(data, exif_rotate=True), expected)


@pytest.mark.parametrize("options", JPEGS.values(), ids=JPEGS)
def test_a_damaged_jpeg_is_to_nobody_what_pillow_does_not_show(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = encode(Image.fromarray(NOISE[:40, :40]), "JPEG", **options)
    rng = np.random.default_rng(2)
    for _ in range(100):
        data = bytearray(whole)
        for at in rng.integers(len(data), size=rng.integers(1, 4)):
            data[at] = rng.integers(256)
        if rng.random() < 0.3:
            del data[rng.integers(len(data)) :]
        expected = by_pillow(bytes(data), monkeypatch)
        if expected is None:
            with pytest.raises(DecodeError):
                decode(bytes(data), exif_rotate=True)
        else:
            np.testing.assert_array_equal(decode(bytes(data), exif_rotate=True), expected)


def test_an_orientation_behind_the_frame_counts() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = encode(Image.new("RGB", (8, 4)), "JPEG")
    block = exif.tobytes()
    segment = b"\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block
    scan = plain.index(b"\xff\xda")
    data = plain[:scan] + segment + plain[scan:]
    assert decode(data, exif_rotate=True).shape == (8, 4, 3)
    assert decode(data, exif_rotate=False).shape == (4, 8, 3)


@pytest.mark.parametrize(
    "insert",
    [
        pytest.param(b"\xff\xd0", id="a marker without length"),
        pytest.param(b"\xff\xc0\x00\x0b\x08\x00\x01\x00\x01\x01\x01\x11\x00", id="a second frame"),
    ],
)
def test_what_two_readers_may_read_differently_is_for_pillow(insert: bytes) -> None:
    plain = encode(Image.new("RGB", (8, 4)), "JPEG")
    assert decode_module._is_simple_jpeg(plain, exif_rotate=True)
    for at in (2, plain.index(b"\xff\xda")):
        data = plain[:at] + insert + plain[at:]
        assert not decode_module._is_simple_jpeg(data, exif_rotate=True)


JPEGS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 3},
    "grey": {},
}


@pytest.mark.parametrize("kind", JPEGS)
def test_a_part_is_what_the_whole_shows_there(
    picture: Callable[..., Image.Image], kind: str
) -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="exists for Linux alone")
    image = picture(90, 70)
    file = io.BytesIO()
    (image.convert("L") if kind == "grey" else image).save(file, "JPEG", quality=88, **JPEGS[kind])
    data = file.getvalue()
    assert jpeg_size(data, exif_rotate=True) == (70, 90)
    whole = decode(data, exif_rotate=True)
    rng = np.random.default_rng(0)
    for _ in range(60):
        left, top = int(rng.integers(90)), int(rng.integers(70))
        right, bottom = int(rng.integers(left, 90)) + 1, int(rng.integers(top, 70)) + 1
        part = decode_part(data, (left, top, right, bottom))
        np.testing.assert_array_equal(part, whole[top:bottom, left:right])


def test_a_part_of_what_must_be_seen_whole(picture: Callable[..., Image.Image]) -> None:
    file, turned, cmyk = io.BytesIO(), io.BytesIO(), io.BytesIO()
    picture(90, 70).save(file, "JPEG")
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(90, 70).save(turned, "JPEG", exif=exif)
    picture(90, 70).convert("CMYK").save(cmyk, "JPEG")
    assert jpeg_size(file.getvalue()[:-40], exif_rotate=True) is None  # its end may be missing
    assert jpeg_size(turned.getvalue(), exif_rotate=True) is None
    assert jpeg_size(turned.getvalue(), exif_rotate=False) == (70, 90)
    assert jpeg_size(cmyk.getvalue(), exif_rotate=True) is None
    assert jpeg_size(b"", exif_rotate=True) is None
    assert decode_part(file.getvalue()[:60], (0, 0, 5, 5)) is None


def test_what_a_gpu_may_decode(picture: Callable[..., Image.Image]) -> None:
    def size(**options: Any) -> tuple[int, int] | None:
        file = io.BytesIO()
        picture(90, 70).convert(options.pop("mode", "RGB")).save(file, "JPEG", **options)
        return size_for_gpu(file.getvalue(), exif_rotate=True)

    for subsampling in (0, 1, 2):
        assert size(subsampling=subsampling) == (70, 90)
    exif = Image.Exif()
    exif[0x0112] = 6
    for options in ({"progressive": True}, {"mode": "L"}, {"mode": "CMYK"}, {"exif": exif}):
        assert size(**options) is None
    assert size(keep_rgb=True) is None  # stored as RGB, which some decoders take for YCbCr
    assert size_for_gpu(b"\xff\xd8", exif_rotate=True) is None
