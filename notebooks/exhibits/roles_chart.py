"""Chart the ledgers of several models by role, each above its floors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rosellm.lab.figures.charts import Chart, finish, text_table
from rosellm.lab.figures.palette import CAUSES, PALE, VIOLET, fill
from rosellm.lab.records.account import WORKING
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.records import number

# The causes of ledger rows that a role combines; rows in which nothing runs are "idle".
ROLES = {
    "GEMM": ("GEMM", "layers"),
    "head": ("head",),
    "attention": ("attention", "append"),
    "norm": ("norm",),
    "sampling": ("sampling",),
}
OTHER_WORK, IDLE = "other work", "idle"
STYLES = CAUSES | {OTHER_WORK: (VIOLET, "/"), IDLE: (PALE, "")}


def roles_chart(ledgers: Mapping[str, Ledger], title: str) -> Chart:
    """Draw a bar of each step by role, and below it a bar of the roles' floors, in % of the step."""
    roles = {name: by_role(ledger) for name, ledger in ledgers.items()}
    drawn = [role for role in (*ROLES, OTHER_WORK, IDLE) if any(role in one for one in roles.values())]
    chart, places = Chart(), [y for i in range(len(ledgers)) for y in (3 * i, 3 * i + 0.9)]
    for role in drawn:
        spent = [one.get(role, RoleTime(0.0, None)) for one in roles.values()]
        us = [value for time in spent for value in (time.us, time.floor_us or 0.0)]
        whole = [ledger.step_us for ledger in ledgers.values() for _ in range(2)]
        chart.add_bar(
            x=[part / step * 100 for part, step in zip(us, whole, strict=True)],
            y=places,
            width=[0.95, 0.6] * len(ledgers),
            orientation="h",
            name=role,
            marker=fill(*STYLES[role]),
            hovertext=[f"{number(part)} µs" for part in us],
            hoverinfo="name+text",
        )
    named = [f"<b>{name}</b>, {number(one.step_us)} µs" for name, one in ledgers.items()]
    texts = [f"{text}  " for name in named for text in (name, "floor")]
    chart.update_layout(barmode="stack")
    chart.update_xaxes(title_text="% of the step")
    chart.update_yaxes(tickvals=places, ticktext=texts, autorange="reversed", showgrid=False, ticks="")
    rows = [[name, role, *time] for name, one in roles.items() for role, time in one.items()]
    chart.table = text_table(["", "role", "µs", "floor, µs"], rows)
    return finish(chart, title, 66 * len(ledgers), legend=drawn)


class RoleTime(NamedTuple):
    """µs of a step, and their lower bound; None if unknown."""

    us: float
    floor_us: float | None


def by_role(ledger: Ledger) -> dict[str, RoleTime]:
    """Return role → time in the order of ``ROLES``, then other work and idle; zero times are omitted."""
    us = dict.fromkeys([*ROLES, OTHER_WORK, IDLE], 0.0)
    floors: dict[str, list[float]] = {role: [] for role in us}
    for row in ledger.rows:
        role = next((role for role, causes in ROLES.items() if row.cause in causes), OTHER_WORK)
        role = role if row.kind in WORKING else IDLE
        us[role] += row.us
        floors[role] += [] if row.floor_us is None else [row.floor_us]
    return {role: RoleTime(spent, sum(floors[role]) or None) for role, spent in us.items() if spent}
