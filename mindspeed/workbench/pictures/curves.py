"""Curves with axes, drawn by matplotlib as SVG that follows the colours and the width of its page."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from typing import Any, Final, Literal

from mindspeed.workbench.html_page import figure, inline, paragraph

COLOURS: Final = ("#4a7fd6", "#d6804a", "#5a9e5a", "#a05ab0", "#c2a12b", "#3a9c9c")
"""Of lines; they stand out on light and on dark pages."""
BASELINE: Final = "#8b8f98"
_INK: Final = "#010203"
"""Replaced by the colour of the page's text."""
_MOST: Final = 400
"""Points of a line; of a longer one every n-th."""
_STYLE: Final = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mindspeed",  # equal curves are equal text
    "font.size": 9.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "grid.color": BASELINE,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "axes.formatter.useoffset": False,
}

Style = Literal["line", "points", "dashed", "steps"]
_FORMATS: Final[dict[Style, dict[str, Any]]] = {
    "line": {},
    "points": {"linestyle": "", "marker": "o"},
    "dashed": {"linestyle": (0, (4, 3)), "linewidth": 1.2},
    "steps": {"drawstyle": "steps-post", "linestyle": (0, (2, 1.5)), "linewidth": 1.1},
}


@dataclass(frozen=True, slots=True)
class Line:
    """Points under a name; ``colour`` is the next one of `COLOURS` if not given."""

    name: str
    points: Sequence[tuple[float, float]]
    style: Style = "line"
    colour: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one pair of axes, whose labels have units. ``levels`` are horizontal lines: name, height and colour."""

    title: str
    across: str
    up: str
    lines: Sequence[Line]
    note: str = ""
    levels: Sequence[tuple[str, float, str]] = field(default=())
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars with their values, whose axis has a unit; less than zero is to the left."""

    title: str
    across: str
    values: Sequence[tuple[str, float]]
    note: str = ""


def drawn(chart: Chart) -> str:
    """Return a chart as a figure of a page; a sentence where matplotlib is missing or no line has two points."""
    lines = [line for line in chart.lines if len(line.points) > 1 or (line.points and line.style == "points")]
    if not lines:
        return figure(chart.title, paragraph("too few points for a curve"), chart.note)
    return _figure(chart.title, f"{chart.up} by {chart.across}", lambda axes: _put_lines(axes, chart, lines), chart.note)


def drawn_bars(bars: Bars) -> str:
    """Return bars as a figure of a page; a sentence where matplotlib is missing."""
    height = 0.75 + 0.3 * len(bars.values)
    return _figure(bars.title, bars.across, lambda axes: _put_bars(axes, bars), bars.note, height)


def _put_lines(axes: Any, chart: Chart, lines: Sequence[Line]) -> None:
    colours = iter(COLOURS * (len(lines) // len(COLOURS) + 1))
    for line in lines:
        across, up = zip(*_thinned(line.points), strict=True)
        axes.plot(across, up, label=line.name, color=line.colour or next(colours), **_FORMATS[line.style])
    for name, height, colour in chart.levels:
        axes.axhline(height, label=name, color=colour, **_FORMATS["dashed"])
    axes.set(xlabel=chart.across, ylabel=chart.up)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if (count := len(lines) + len(chart.levels)) > 1:
        axes.figure.legend(ncols=min(count, 3), loc="outside upper left")
    axes.locator_params(axis="x", nbins=8, integer=chart.across == "step")


def _put_bars(axes: Any, bars: Bars) -> None:
    names, values = zip(*reversed(bars.values), strict=True)
    labels = [f"{name}  {value:+.1f}" for name, value in zip(names, values, strict=True)]
    axes.barh(labels, values, color=[COLOURS[2] if value <= 0 else COLOURS[1] for value in values], height=0.55)
    axes.axvline(0, color=_INK, linewidth=0.6)
    axes.set(xlabel=bars.across)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(visible=False, axis="y")


def _figure(title: str, label: str, put: Callable[[Any], None], note: str = "", height: float = 2.5) -> str:
    """Return a figure of a page whose axes ``put`` fills; ``label`` is for readers that do not see."""
    if find_spec("matplotlib") is None:
        return figure(title, paragraph("matplotlib is not installed, so there is no curve: pip install matplotlib"))
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        drawing = Figure(figsize=(5, height), layout="constrained")
        put(drawing.add_subplot())
        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawing.set_canvas(FigureCanvasSVG(drawing))
        drawing.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = re.sub(r"<!--.*?-->\n?", "", text.getvalue().replace(_INK, "currentColor"), flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(f"{title}: {label}")}" ', 1)
    return figure(title, inline(svg, "curve full"), note)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    stride = -(-len(points) // _MOST)
    return points if stride == 1 else [*points[::stride], points[-1]]
