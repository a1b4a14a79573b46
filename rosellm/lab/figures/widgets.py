"""Controls that redraw a figure.

A single control's figures are pre-rendered for pages without a kernel.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets
from IPython.display import display
from IPython.utils.capture import capture_output

from rosellm.errors import RoseError
from rosellm.lab.figures.charts import PLOTLY

WIDGET = "application/vnd.jupyter.widget-view+json"
# A label, and for each value its text and its figure's difference from the one shown.
FRAMES = "application/vnd.rosellm.frames+json"
LABEL = {"description_width": "initial"}
WIDE = {"width": "32em"}


class ControlError(RoseError):
    """A control without choices or with an invalid initial value, or a drawing with no or several outputs."""


@dataclass(frozen=True)
class Control:
    """One value to choose, by mouse or arrow keys.

    label: name and unit. values: numbers or strings, all on a slider because in JupyterLab the arrow keys
    move from a drop-down to another cell. first: the initial value.
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
    def options(self) -> list[tuple[str, Any]]:
        """Each value with its text."""
        return [(value if isinstance(value, str) else f"{value:,}", value) for value in self.values]

    def widget(self) -> ipywidgets.ValueWidget:
        """Return the ipywidgets slider, which reports a change on release."""
        return ipywidgets.SelectionSlider(
            options=self.options,
            value=self.values[0] if self.first is None else self.first,
            description=self.label,
            style=LABEL,
            layout=WIDE,
            continuous_update=False,
        )


def explore(draw: Callable[..., None], **controls: Control) -> None:
    """Display controls and what ``draw`` shows for their values, redrawn whenever one changes.

    draw: called with one keyword argument per control; it must ``show`` or ``display`` exactly one output.
    The first drawing is an ordinary cell output, visible on pages without JavaScript; once a control moves,
    an output widget replaces it (plotly's renderer ignores updates of an ordinary output). With a single
    control its ``FRAMES`` are included, for pages with JavaScript but no kernel.
    """
    widgets = {name: control.widget() for name, control in controls.items()}
    first = _drawn(draw, {name: widget.value for name, widget in widgets.items()})
    if len(controls) == 1:
        (named,) = controls.items()
        first |= _frames(draw, named, first.get(PLOTLY))
    live = ipywidgets.Output()
    box = ipywidgets.VBox([*widgets.values(), live])
    display({WIDGET: {"version_major": 2, "version_minor": 0, "model_id": box.model_id}}, raw=True)
    still = display(first, raw=True, display_id=True)

    def redraw(_change: object) -> None:
        live.outputs = (_redrawn(draw, widgets),)
        still.update({"text/html": ""}, raw=True)

    for widget in widgets.values():
        widget.observe(redraw, "value")


def _frames(draw: Callable[..., None], named: tuple[str, Control], shown: Any) -> dict[str, Any]:
    """Return the figures of all values of a control, as differences; {} if any is not a plotly figure."""
    name, control = named
    figures = [_drawn(draw, {name: value}).get(PLOTLY) for value in control.values]
    if None in figures:
        return {}
    first = control.values[0] if control.first is None else control.first
    texts = [text for text, _ in control.options]
    frames = {"label": control.label, "values": texts, "first": list(control.values).index(first)}
    return {FRAMES: frames | {"figures": [_difference(one, shown) for one in figures]}}


def _difference(new: Any, old: Any) -> Any:
    """Return what :func:`merged` needs to turn ``old`` into ``new``; None marks what only ``old`` has."""
    if isinstance(new, dict) and isinstance(old, dict):
        differing = [key for key in {**old, **new} if new.get(key) != old.get(key)]
        return {key: _difference(new.get(key), old.get(key)) for key in differing}
    if _are_alike(new, old):
        return [_difference(*pair) for pair in zip(new, old, strict=True)]
    return new


def merged(old: Any, difference: Any) -> Any:
    """Return ``old``, such as a figure's JSON, with a difference applied."""
    if isinstance(difference, dict) and isinstance(old, dict):
        return old | {key: merged(old.get(key), value) for key, value in difference.items()}
    if _are_alike(difference, old):
        return [merged(*pair) for pair in zip(old, difference, strict=True)]
    return difference


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether both are lists of equally many dicts, such as a figure's traces."""
    are_lists = isinstance(one, list) and isinstance(other, list) and len(one) == len(other)
    return are_lists and all(isinstance(item, dict) for item in (*one, *other))


def _drawn(draw: Callable[..., None], values: dict[str, Any]) -> dict[str, Any]:
    """Return what ``draw`` displays for these values, by MIME type."""
    with capture_output(stdout=False, stderr=False) as captured:
        draw(**values)
    if len(captured.outputs) != 1:
        raise ControlError(f"the drawing must show exactly one thing; it showed {len(captured.outputs)}")
    return captured.outputs[0].data


def _redrawn(draw: Callable[..., None], widgets: dict[str, ipywidgets.ValueWidget]) -> dict[str, Any]:
    """Return the new drawing as a cell output; errors too, since no running cell could show them."""
    try:
        data = _drawn(draw, {name: widget.value for name, widget in widgets.items()})
        return {"output_type": "display_data", "data": data, "metadata": {}}
    except Exception as error:
        kind, trace = type(error).__name__, traceback.format_exc().splitlines()
        return {"output_type": "error", "ename": kind, "evalue": str(error), "traceback": trace}
