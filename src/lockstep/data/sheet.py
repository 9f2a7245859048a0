"""A contact sheet: a few images of each class on one page. Level 2."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lockstep.data.check import SplitReport, reason
from lockstep.data.decode import DecodeError, decode
from lockstep.data.source import FolderSource

MAX_CLASSES = 12
TILES = {"train": 5, "val": 3}
"""Images of each split in a class's row."""

_TILE, _GAP, _LABEL, _HEAD = 128, 6, 190, 26
_PAPER, _INK, _PALE, _RED = (250, 250, 250), (20, 20, 20), (110, 110, 110), (190, 30, 30)
_FONTS = (
    *("DejaVuSans.ttf", "NotoSans-Regular.ttf", "NotoSansCJK-Regular.ttc", "NotoSansArabic.ttf"),
    *("Arial Unicode.ttf", "segoeui.ttf", "msgothic.ttc", "malgun.ttf"),
)
"""Where the system has them: of many scripts first."""
_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def contact_sheet(root: Path, reports: Sequence[SplitReport]) -> Image.Image:
    """A row for each of up to 12 classes: 5 images of train, 3 of val, turned as EXIF says.

    Classes and images are spread evenly over the sorted names. Unreadable ones come into up to a
    third of the rows and tiles; such a tile is red and tells the file's name and the reason.

    Args:
        reports: of the same root, as :func:`lockstep.data.check.check` made them.

    Raises:
        UserError: the folders cannot be listed any more.
    """
    sources = {r.split: FolderSource.open(root, r.split, strict=False) for r in reports}
    classes = sorted({name for report in reports for name in report.counts}, key=os.fsencode)
    spoiled = {name.partition("/")[0] for report in reports for name in report.unreadable}
    rows = _pick(
        [i for i, name in enumerate(classes) if name not in spoiled],
        [i for i, name in enumerate(classes) if name in spoiled],
        MAX_CLASSES,
    )
    lefts = _lefts(sources)
    width = lefts[-1] + TILES[reports[-1].split] * (_TILE + _GAP)
    page = Image.new("RGB", (width, _HEAD + len(rows) * (_TILE + _GAP)), _PAPER)
    draw = ImageDraw.Draw(page)
    for split, left in zip(sources, lefts, strict=True):
        draw.text((left, 6), split, _INK, _font(14))
    shown = f"{len(rows)} of {len(classes):,} classes" if len(rows) < len(classes) else ""
    draw.text((_GAP, 6), shown, _PALE, _font(14))
    for row, name in enumerate(classes[i] for i in rows):
        top = _HEAD + row * (_TILE + _GAP)
        _draw_label(draw, top, name, [report.counts.get(name, 0) for report in reports])
        for report, left in zip(reports, lefts, strict=True):
            source = sources[report.split]
            target = source.classes.index(name) if name in report.counts else -1
            members = np.flatnonzero(source.targets == target).tolist()
            bad = {i for i in members if source.name(i) in report.unreadable}
            good = [i for i in members if i not in bad]
            for column, index in enumerate(_pick(good, sorted(bad), TILES[report.split])):
                tile = _tile(source, index)
                centred = (_TILE - tile.width) // 2, (_TILE - tile.height) // 2
                corner = left + column * (_TILE + _GAP)
                page.paste(tile, (corner + centred[0], top + centred[1]))
    return page


def _lefts(splits: Iterable[str]) -> list[int]:
    """Where each split's tiles begin, with a wider gap between splits."""
    lefts, left = [], _LABEL
    for split in splits:
        lefts.append(left)
        left += TILES[split] * (_TILE + _GAP) + 2 * _GAP
    return lefts


def _pick(plain: Sequence[int], special: Sequence[int], most: int) -> list[int]:
    """At most ``most``, a third of them special, or more where the plain ones do not suffice."""
    num_special = min(len(special), max(most // 3, most - len(plain)))
    return sorted(_spread(plain, most - num_special) + _spread(special, num_special))


def _spread(items: Sequence[int], most: int) -> list[int]:
    if len(items) <= most:
        return list(items)
    return [items[int(at)] for at in np.linspace(0, len(items) - 1, most).round()]


def _tile(source: FolderSource, index: int) -> Image.Image:
    try:
        image = Image.fromarray(np.asarray(decode(source.read(index), exif_rotate=True)))
    except (OSError, DecodeError) as error:
        tile = Image.new("RGB", (_TILE, _TILE), _RED)
        file_name = source.name(index).rpartition("/")[2]
        _draw_lines(ImageDraw.Draw(tile), (6, 6), [(file_name, 3), (reason(error), 5)], "white")
        return tile
    image.thumbnail((_TILE, _TILE))
    if max(image.size) < _TILE:  # small ones are enlarged as they are, pixel by pixel
        times = max(1, _TILE // max(image.size))
        image = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    return image


def _draw_label(draw: ImageDraw.ImageDraw, top: int, name: str, counts: Sequence[int]) -> None:
    _draw_lines(draw, (_GAP, top + 4), [(name, 5)], _INK, size=15, width=_LABEL - 2 * _GAP)
    told = " + ".join(f"{count:,}" for count in counts)
    draw.text((_GAP, top + _TILE - 20), told, _PALE, _font(13))


def _draw_lines(
    draw: ImageDraw.ImageDraw,
    at: tuple[int, int],
    parts: Sequence[tuple[str, int]],
    ink: str | tuple[int, int, int],
    *,
    size: int = 12,
    width: int = _TILE - 2 * _GAP,
) -> None:
    """Each part on so many lines at most, of about so many pixels."""
    font = _font(size, "".join(text for text, _ in parts))
    lines: list[str] = []
    for text, most in parts:
        text = "".join(c if _draws(font, c) else _escaped(c) for c in text)
        # Lines differ from the mean width of a character: keep a little room.
        characters = max(1, int(0.93 * width * len(text) / max(font.getlength(text), 1)))
        lines += textwrap.wrap(text, characters, max_lines=most, placeholder="...")
    draw.multiline_text(at, "\n".join(lines), ink, font)


@lru_cache
def _font(size: int, text: str = "") -> _Font:
    """The one that draws the most of a text, Pillow's own where the system has none."""
    fonts: list[_Font] = []
    for name in _FONTS:
        with suppress(OSError):
            fonts.append(ImageFont.truetype(name, size))
    fonts.append(ImageFont.load_default(size))
    return max(fonts, key=lambda font: sum(_draws(font, c) for c in text))


def _draws(font: _Font, character: str) -> bool:
    """Whether it shows more than the box for the unknown."""
    if not character.isprintable():
        return False
    return character == " " or bytes(font.getmask(character)) != bytes(font.getmask("\U0010ffff"))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()
