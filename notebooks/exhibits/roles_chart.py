"""Chart the ledgers of several models by role, each above its floors."""

from __future__ import annotations

from collections.abc import Mapping

from rosellm.lab.figures.charts import Chart, finish, text_table
from rosellm.lab.figures.palette import CAUSES, PALE, VIOLET, fill
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.model_ladder import IDLE, OTHER_WORK, ROLES, RoleTime, by_role
from rosellm.lab.records.records import number

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
