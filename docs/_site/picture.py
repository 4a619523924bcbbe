"""The picture of a federation of unlike networks, for light and dark pages: run this file to write it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"
LIGHT = {"ink": "#1c2530", "muted": "#5b6775", "line": "#b8c1cb", "box": "#ffffff", "edge": "#cfd6dd"}
DARK = {"ink": "#e8ebef", "muted": "#a3adb9", "line": "#566270", "box": "#232a33", "edge": "#3b4653"}
SITES = [  # name, network, layers by number of units, color on light and on dark
    ("hospital", "its own CNN", (2, 3, 4, 2), "#0072b2", "#3d9be0"),
    ("clinic", "a small MLP", (3, 2), "#d55e00", "#f0783c"),
    ("laboratory", "a ResNet", (3, 3, 3, 3, 3), "#009e73", "#1fc49a"),
    ("practice", "a wide MLP", (4, 4, 2), "#a8578a", "#e3a5c8"),
]


def network(x: float, y: float, layers: tuple[int, ...], color: str, line: str) -> list[str]:
    """Return a small drawing of a network: circles in columns, joined."""
    step, gap = 130 / max(1, len(layers) - 1) if len(layers) > 2 else 70, 17
    start = x - step * (len(layers) - 1) / 2
    places = [
        [(start + step * place, y + gap * (unit - (count - 1) / 2)) for unit in range(count)]
        for place, count in enumerate(layers)
    ]
    found = [
        f'<path d="M{a:.0f} {b:.0f}L{c:.0f} {d:.0f}" stroke="{line}" stroke-width="1"/>'
        for left, right in pairwise(places)
        for a, b in left
        for c, d in right
    ]
    return found + [f'<circle cx="{a:.0f}" cy="{b:.0f}" r="5.5" fill="{color}"/>' for col in places for a, b in col]


def picture(dark: bool) -> str:
    """Return the picture."""
    look = DARK if dark else LIGHT
    font = 'font-family="system-ui, sans-serif" text-anchor="middle"'
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 400" role="img" aria-label="Four sites with unlike '
        'networks exchange messages with a server; their data stays where it is">',
        f'<rect x="320" y="14" width="240" height="74" rx="10" fill="{look["box"]}" stroke="{look["edge"]}"/>',
        f'<text x="440" y="46" {font} font-size="19" font-weight="600" fill="{look["ink"]}">server</text>',
        f'<text x="440" y="70" {font} font-size="14" fill="{look["muted"]}">combines what arrives</text>',
    ]
    for place, (name, kind, layers, light_color, dark_color) in enumerate(SITES):
        x, color = 110 + 220 * place, dark_color if dark else light_color
        top = 355 + 57 * place
        parts += [
            f'<path d="M{x} 178C{x} 120 {top} 150 {top} 90" fill="none" stroke="{color}" stroke-width="2.5"/>',
            f'<circle cx="{(x + top) / 2:.0f}" cy="134" r="5" fill="{color}"/>',
            f'<rect x="{x - 98}" y="178" width="196" height="206" rx="10" fill="{look["box"]}" '
            f'stroke="{look["edge"]}"/>',
            f'<text x="{x}" y="206" {font} font-size="17" font-weight="600" fill="{look["ink"]}">{name}</text>',
            f'<text x="{x}" y="226" {font} font-size="13.5" fill="{look["muted"]}">{kind}</text>',
            *network(x, 278, layers, color, look["line"]),
            f'<rect x="{x - 76}" y="334" width="152" height="32" rx="6" fill="none" stroke="{look["line"]}" '
            'stroke-dasharray="4 4"/>',
            f'<text x="{x}" y="355" {font} font-size="13" fill="{look["muted"]}">data stays here</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    for name, dark in (("light", False), ("dark", True)):
        (ASSETS / f"federation-{name}.svg").write_text(picture(dark))
