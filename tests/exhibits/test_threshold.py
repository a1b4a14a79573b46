"""The figure of a draw without sorting."""

from rosellm.roseinfer.exhibits import load_exhibit

threshold_chart = load_exhibit("threshold").threshold_chart

MAXIMA = [1.0, 5.0, 2.0, 4.0]
CANDIDATES = [(1, 5.0), (1, 3.5), (3, 4.0)]


def chart_of(**changes):
    given = {"bound": 3.0, "candidates": CANDIDATES, "tried": [(1, 3.5), (3, 4.0)], "lowest_kept": 4.0}
    return threshold_chart(MAXIMA, 64, title="Where?", **given | changes)


def test_each_tile_and_each_candidate_is_drawn_once_and_draws_are_numbered():
    drawn = {trace.name: list(zip(trace.x, trace.y, strict=True)) for trace in chart_of().data}
    assert list(drawn.values()) == [
        [(0, 1.0), (2, 2.0)],
        [(1, 3.5)],
        [(1, 5.0), (3, 4.0)],
        [(1, 3.5), (3, 4.0)],
    ]
    assert list(chart_of().data[-1].text) == ["<b>1</b>", "<b>2</b>"]


def test_its_table_counts_what_is_left_at_each_stage():
    rows = [line.split() for line in chart_of().table.splitlines()[2:]]
    assert [int(row[-2]) for row in rows] == [256, 128, 3, 2, 2]
    assert [row[-1] for row in rows] == ["–", "–", "3.00", "4.00", "3.50"]
