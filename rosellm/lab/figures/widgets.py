"""Controls that redraw a figure; on static pages the figure of their initial values remains."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets
from IPython.display import display
from IPython.utils.capture import capture_output

from rosellm.errors import RoseError

WIDGET = "application/vnd.jupyter.widget-view+json"
LABEL = {"description_width": "initial"}
WIDE = {"width": "32em"}


class ControlError(RoseError):
    """A control without choices or with an invalid initial value, or a drawing that shows not one thing."""


@dataclass(frozen=True)
class Control:
    """One value to choose, by mouse or arrow keys.

    label: its name and unit. values: a range, numbers or texts in a list (all shown as a slider, since in
    JupyterLab the arrow keys leave a drop-down for another cell), or True or False (a check box with that
    initial value). first: the initial value.
    """

    label: str
    values: range | Sequence[Any] | bool
    first: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.values, bool):
            if self.first is not None:
                raise ControlError(
                    f"{self.label}: a check box begins with its value; leave out first={self.first!r}"
                )
        elif not len(self.values):
            raise ControlError(f"{self.label}: there is nothing to choose from")
        elif self.first is not None and self.first not in self.values:
            raise ControlError(f"{self.label}: {self.first!r} is not among {list(self.values)}")

    def widget(self) -> ipywidgets.ValueWidget:
        """The ipywidgets control; a slider reports when it is let go."""
        if isinstance(self.values, bool):
            return ipywidgets.Checkbox(value=self.values, description=self.label, indent=False, layout=WIDE)
        first = self.values[0] if self.first is None else self.first
        common = {"value": first, "description": self.label, "style": LABEL, "layout": WIDE}
        if isinstance(self.values, range):
            ends = {"min": self.values[0], "max": self.values[-1], "step": self.values.step}
            return ipywidgets.IntSlider(**ends, **common, continuous_update=False)
        options = [(value if isinstance(value, str) else f"{value:,}", value) for value in self.values]
        return ipywidgets.SelectionSlider(options=options, **common, continuous_update=False)


def explore(draw: Callable[..., None], **controls: Control) -> None:
    """Displays controls and what ``draw`` shows for their values, redrawn whenever one changes.

    draw: called with one keyword argument per control; it must ``show`` or ``display`` exactly one thing. The
    first drawing is an ordinary output of the cell, so that pages without JavaScript have it; once a control
    is moved, an output widget replaces it (plotly's renderer ignores updates of an ordinary output).
    """
    widgets = {name: control.widget() for name, control in controls.items()}
    first = _drawn(draw, widgets)
    live = ipywidgets.Output()
    box = ipywidgets.VBox([*widgets.values(), live])
    display({WIDGET: {"version_major": 2, "version_minor": 0, "model_id": box.model_id}}, raw=True)
    still = display(first, raw=True, display_id=True)

    def redraw(_change: object) -> None:
        live.outputs = (_redrawn(draw, widgets),)
        still.update({"text/html": ""}, raw=True)

    for widget in widgets.values():
        widget.observe(redraw, "value")


def _drawn(draw: Callable[..., None], widgets: dict[str, ipywidgets.ValueWidget]) -> dict[str, Any]:
    """What ``draw`` displays for the controls' current values, by MIME type."""
    with capture_output(stdout=False, stderr=False) as captured:
        draw(**{name: widget.value for name, widget in widgets.items()})
    if len(captured.outputs) != 1:
        raise ControlError(f"the drawing must show exactly one thing; it showed {len(captured.outputs)}")
    return captured.outputs[0].data


def _redrawn(draw: Callable[..., None], widgets: dict[str, ipywidgets.ValueWidget]) -> dict[str, Any]:
    """The new drawing as a cell output; an error too, since no cell is running that could show it."""
    try:
        return {"output_type": "display_data", "data": _drawn(draw, widgets), "metadata": {}}
    except Exception as error:
        kind, trace = type(error).__name__, traceback.format_exc().splitlines()
        return {"output_type": "error", "ename": kind, "evalue": str(error), "traceback": trace}
