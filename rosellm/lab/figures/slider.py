"""Show a figure for each value of a control, selected with a plotly slider; no Jupyter kernel is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.display import display
from IPython.utils.capture import capture_output

from rosellm.errors import RoseError
from rosellm.lab.figures.charts import PLOTLY

ROOM = 78  # pixels for the slider, between the title and the plot
BESIDE = 30  # pixels left and right of the plot


class ControlError(RoseError):
    """A control without choices or with an invalid initial value, or a drawing that is not one figure."""


@dataclass(frozen=True)
class Control:
    """A value that the reader chooses.

    label: name and unit of the value.
    values: the numbers or strings to choose from.
    first: the initial value; None for the first of ``values``.

    Raises ``ControlError`` without values, or if ``first`` is not among the values.
    """

    label: str
    values: Sequence[Any]
    first: Any = None

    def __post_init__(self) -> None:
        if not len(self.values):
            raise ControlError(f"{self.label}: there is nothing to choose from")
        if self.first is not None and self.first not in self.values:
            raise ControlError(f"{self.label}: {self.first!r} is not among {list(self.values)}")

    @property
    def start(self) -> int:
        """The index of the initial value in ``values``."""
        return 0 if self.first is None else list(self.values).index(self.first)


def explore(draw: Callable[..., None], **controls: Control) -> None:
    """Display a slider, and the figure that ``draw`` shows for the value chosen with it.

    draw: called once for each value, as a keyword argument; must ``show`` exactly one figure.
    controls: a single control, by the name of the keyword argument.

    The figures of all values are drawn in advance, as parts of one plotly figure. Raises ``ControlError``.
    """
    ((name, control),) = controls.items()
    drawn = [_drawn(draw, {name: value}) for value in control.values]
    figures = [one[PLOTLY] for one in drawn]
    layouts = [_with_room(figure["layout"]) for figure in figures]
    flat = [dict(_flat(layout)) for layout in layouts]
    varying = [key for key in dict.fromkeys(key for one in flat for key in one)
               if any(one.get(key) != flat[0].get(key) for one in flat)]  # fmt: skip
    data, steps = [], []
    for at, (value, figure) in enumerate(zip(control.values, figures, strict=True)):
        data += [trace | {"visible": at == control.start} for trace in figure["data"]]
        shown = [at == other for other, one in enumerate(figures) for _ in one["data"]]
        changes = [{"visible": shown}, {key: flat[at].get(key) for key in varying}]
        text = value if isinstance(value, str) else f"{value:,}"
        steps.append({"method": "update", "label": text, "args": changes})
    left, right = (max(0, 3 * len(steps[at]["label"]) - BESIDE) for at in (0, -1))  # half of a long label
    pad = {"b": 14, "l": left, "r": right}
    slider = {"steps": steps, "active": control.start, "y": 1, "yanchor": "bottom", "pad": pad}
    slider |= {"currentvalue": {"prefix": f"{control.label}: "}, "font": {"size": 11}}
    figure = {"data": data, "layout": layouts[control.start] | {"sliders": [slider]}}
    display(drawn[control.start] | {PLOTLY: figure | {"config": figures[0]["config"]}}, raw=True)


def _drawn(draw: Callable[..., None], values: dict[str, Any]) -> dict[str, Any]:
    with capture_output(stdout=False, stderr=False) as captured:
        draw(**values)
    if len(captured.outputs) != 1 or PLOTLY not in captured.outputs[0].data:
        raise ControlError(f"the drawing must show exactly one figure; it showed {len(captured.outputs)}")
    return captured.outputs[0].data


def _with_room(layout: dict[str, Any]) -> dict[str, Any]:
    """Return a layout with space for the slider above the plot; the title stays as far from the top."""
    height, title, margin = layout["height"] + ROOM, layout["title"], layout["margin"]
    title = title | {"y": 1 - (1 - title["y"]) * layout["height"] / height}
    return layout | {"height": height, "title": title, "margin": margin | {"t": margin["t"] + ROOM}}


def _flat(layout: dict[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name, such as ``xaxis.range``, and the value of every attribute of a plotly layout."""
    for key, value in layout.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{name}{key}.")
        else:
            yield f"{name}{key}", value
