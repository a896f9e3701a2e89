"""Draws bars as SVG: one group for each metric, one bar for each server, scaled in each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLOURS = ("#3b6ea5", "#c8762b", "#4f8f4f", "#8a5a9e", "#a04848", "#777777")
LABEL, WIDTH, VALUE = 330, 420, 110
"""Pixels: names on the left, bars, figures on the right."""

BAR, GAP = 14, 12


def bars_svg(rows: Sequence[Mapping[str, Any]], servers: Sequence[str]) -> str:
    """``rows`` have ``workload metric unit server median``. Returns a whole SVG file."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        title = f"{row['workload']}: {row['metric']}, {row['unit']}"
        groups.setdefault(title, {})[row["server"]] = row["median"]
    height = 30 + sum(GAP + BAR * len(group) for group in groups.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + VALUE}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, server in enumerate(servers):
        x = LABEL + 110 * index
        parts.append(f'<rect x="{x}" y="6" width="10" height="10" fill="{_colour(index)}"/>')
        parts.append(f'<text x="{x + 14}" y="15">{escape(server)}</text>')
    y = 30
    for title, group in groups.items():
        parts.append(f'<text x="{LABEL - 8}" y="{y + 11}" text-anchor="end">{escape(title)}</text>')
        most = max(group.values())
        for index, server in enumerate(servers):
            if server not in group:
                continue
            value = group[server]
            width = max(1.0, WIDTH * value / most) if most > 0 else 1.0
            parts.append(
                f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR - 2}" '
                f'fill="{_colour(index)}"/>'
                f'<text x="{LABEL + width + 4:.1f}" y="{y + 10}">{_shown(value)}</text>'
            )
            y += BAR
        y += GAP
    return "\n".join((*parts, "</svg>")) + "\n"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
