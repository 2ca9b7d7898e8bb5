"""The few elements that a drawing is made of. Standard library only."""

from __future__ import annotations

from xml.etree import ElementTree

Element = ElementTree.Element


def add(parent: Element, tag: str, text: str | None = None, *, cls: str = "", **attributes: float | str) -> Element:
    """A child element; numbers are written short."""
    given = {
        name.replace("_", "-"): value if isinstance(value, str) else f"{value:g}" for name, value in attributes.items()
    }
    child = ElementTree.SubElement(parent, tag, ({"class": cls} if cls else {}) | given)
    child.text = text
    return child


def text(svg: Element, words: str, x: float, y: float, cls: str, anchor: str = "") -> float:
    """A line of text on the base line y; returns the base line of a line below it, less a gap."""
    add(svg, "text", words, cls=cls, x=x, y=y, **({"text_anchor": anchor} if anchor else {}))
    return y + 6


def path(svg: Element, cls: str, *points: tuple[float, float]) -> None:
    add(svg, "path", cls=cls, d="M" + "L".join(f"{x:g} {y:g}" for x, y in points))


def tip(svg: Element, x: float, y: float, direction: str) -> None:
    """An arrow's head that ends at (x, y)."""
    along = {"down": (0, 1), "right": (1, 0), "left": (-1, 0)}[direction]
    back = x - 8 * along[0], y - 8 * along[1]
    side = 4 * along[1], 4 * along[0]
    corners = [(x, y), (back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1])]
    add(svg, "path", cls="tip", d="M" + "L".join(f"{a:g} {b:g}" for a, b in corners) + "Z")
