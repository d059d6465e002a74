"""A drawing of rectangles and text, as SVG for a page and with Pillow for a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from typing import Any, NamedTuple

from PIL import ImageFont

INK = "#1f2933"
FAINT = "#7b8794"
LINE = "#cbd2d9"
_HEAD = 7
SHARD_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#975a16", "#0987a0", "#4a5568")


def colour_of_shard(shard: int) -> str:
    """The colour of a data-parallel rank, the same in all drawings."""
    return SHARD_COLOURS[shard % len(SHARD_COLOURS)]


@lru_cache(maxsize=32)
def font(size: int) -> Any:
    """Pillow's own font."""
    return ImageFont.load_default(size=size)


def width_of(text: str, size: int) -> int:
    """Width of a text, pixels, with what the fonts of browsers may take beyond Pillow's."""
    return int(1.1 * font(size).getlength(text)) + 1


class Rect(NamedTuple):
    """A rectangle; colours as `#rrggbb`, or "" for none."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str


class Text(NamedTuple):
    """A line of text whose baseline is at `y`; `anchor` is "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    size: int
    fill: str
    anchor: str


class Arrow(NamedTuple):
    """A straight line to (to_x, to_y), with a head there."""

    x: float
    y: float
    to_x: float
    to_y: float
    stroke: str

    def head(self) -> list[tuple[float, float]]:
        """The three corners of its head."""
        length = math.hypot(self.to_x - self.x, self.to_y - self.y) or 1.0
        right, down = (self.to_x - self.x) / length, (self.to_y - self.y) / length
        back_x, back_y = self.to_x - _HEAD * right, self.to_y - _HEAD * down
        aside_x, aside_y = _HEAD / 2 * -down, _HEAD / 2 * right
        return [
            (self.to_x, self.to_y),
            (back_x + aside_x, back_y + aside_y),
            (back_x - aside_x, back_y - aside_y),
        ]


@dataclass
class Drawing:
    """What is drawn, in its order.

    Args:
        width: pixels.
        height: pixels.
        title: what it shows, for those who cannot see it.
    """

    width: int
    height: int
    title: str = ""
    shapes: list[Rect | Text | Arrow] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str = "", stroke: str = "") -> None:
        """Add a rectangle."""
        self.shapes.append(Rect(x, y, width, height, fill, stroke))

    def arrow(self, x: float, y: float, to_x: float, to_y: float, stroke: str = INK) -> None:
        """Add an arrow."""
        self.shapes.append(Arrow(x, y, to_x, to_y, stroke))

    def text(
        self, x: float, y: float, text: str, size: int = 12, fill: str = INK, anchor: str = "start", room: float = 0
    ) -> None:
        """Add a line of text, cut to `room` pixels where that is not 0."""
        if room and width_of(text, size) > room:
            while text and width_of(text + "…", size) > room:
                text = text[:-1]
            text += "…"
        self.shapes.append(Text(x, y, text, size, fill, anchor))

    def to_svg(self, alone: bool = False) -> str:
        """The drawing as an `svg` element.

        Args:
            alone: it is a file of its own, and not part of a page, which knows the element and has a font.
        """
        own = ' xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"' if alone else ""
        parts = [
            f'<svg{own} role="img" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}">',
            f"<title>{escape(self.title)}</title>",
        ]
        for shape in self.shapes:
            if isinstance(shape, Rect):
                parts.append(
                    f'<rect x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}" '
                    f'fill="{shape.fill or "none"}" stroke="{shape.stroke or "none"}"/>'
                )
            elif isinstance(shape, Arrow):
                head = " ".join(f"{x:g},{y:g}" for x, y in shape.head())
                parts.append(
                    f'<line x1="{shape.x:g}" y1="{shape.y:g}" x2="{shape.to_x:g}" y2="{shape.to_y:g}" '
                    f'stroke="{shape.stroke}"/><polygon points="{head}" fill="{shape.stroke}"/>'
                )
            else:
                parts.append(
                    f'<text x="{shape.x:g}" y="{shape.y:g}" font-size="{shape.size}" fill="{shape.fill}" '
                    f'text-anchor="{shape.anchor}">{escape(shape.text)}</text>'
                )
        return "".join([*parts, "</svg>"])

    def paint(self, canvas: Any, left: float = 0, top: float = 0) -> None:
        """Draw with Pillow.

        Args:
            canvas: a `PIL.ImageDraw.ImageDraw`.
            left: where the drawing's left edge is to be, pixels.
            top: where its upper edge is to be.
        """
        anchors = {"start": "ls", "middle": "ms", "end": "rs"}
        for shape in self.shapes:
            x, y = left + shape.x, top + shape.y
            if isinstance(shape, Rect):
                box = (x, y, x + max(shape.width - 1, 0), y + max(shape.height - 1, 0))
                canvas.rectangle(box, fill=shape.fill or None, outline=shape.stroke or None)
            elif isinstance(shape, Arrow):
                canvas.line((x, y, left + shape.to_x, top + shape.to_y), fill=shape.stroke)
                canvas.polygon([(left + each_x, top + each_y) for each_x, each_y in shape.head()], fill=shape.stroke)
            else:
                canvas.text((x, y), shape.text, fill=shape.fill, font=font(shape.size), anchor=anchors[shape.anchor])
