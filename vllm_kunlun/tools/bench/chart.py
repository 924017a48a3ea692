"""A bar chart of a comparison as SVG text: how many times better this server is, by work and peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LABEL, RIGHT, ROW, TOP = 760, 330, 70, 26, 34
BAR, EVEN, TEXT = "#2f6f9f", "#b0453a", "#444444"


def bars(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield a label and a ratio for each work and peer."""
    for entry in result["works"].values():
        for peer, ratio in entry.get("times_better", {}).items():
            yield f"{entry['title']}, against {peer}", ratio


def chart(result: Mapping[str, Any]) -> str:
    """Draw every ratio as a bar from zero; a line marks 1x, where both are equal."""
    shown = list(bars(result))
    height = TOP + ROW * len(shown) + 12
    scale = (WIDTH - LABEL - RIGHT) / max([ratio for _, ratio in shown] + [1.0])
    even = LABEL + scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" fill="{TEXT}">',
        f'<text x="{even:.1f}" y="20" text-anchor="middle" fill="{EVEN}">1x</text>',
        *(_bar(index, label, ratio, scale) for index, (label, ratio) in enumerate(shown)),
        f'<line x1="{even:.1f}" x2="{even:.1f}" y1="26" y2="{height - 6}" stroke="{EVEN}" stroke-dasharray="4 3"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bar(index: int, label: str, ratio: float, scale: float) -> str:
    """One row: the label, the bar and its figure."""
    y = TOP + ROW * index
    length = ratio * scale
    return (
        f'<text x="{LABEL - 10}" y="{y + 14}" text-anchor="end">{escape(label)}</text>'
        f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="18" fill="{BAR}"/>'
        f'<text x="{LABEL + length + 6:.1f}" y="{y + 14}">{ratio:.2f}x</text>'
    )
