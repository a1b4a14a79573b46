"""Pictures whose texts fit, whose boxes and labels keep apart, and that say in words what they show."""

import re
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from rosellm.lab.figures.blocks import block_pool
from rosellm.lab.figures.flow import flow
from rosellm.lab.figures.palette import luminance
from rosellm.lab.figures.svg import DiagramError, Picture, text_width, wrap

LANES = {
    "Python (CPU)": [
        "block lists\n12 layers",
        "-small tensors\npageable",
        "*one pinned buffer\n[L, capacity] int32",
    ],
    "PCIe": ["-12 copies", "*1 copy\nnon_blocking=True"],
    "GPU": ["block_table\n[L, B, max_blocks]", "paged attention"],
}
ARROWS = [
    ("block lists", "small tensors", "build"),
    ("small tensors", "12 copies", ""),
    ("12 copies", "block_table", "L copies a step"),
    ("block lists", "one pinned buffer", "write in place"),
    ("one pinned buffer", "1 copy", ""),
    ("1 copy", "block_table", "one copy a step"),
    ("block_table", "paged attention", ""),
    ("paged attention", "block lists", "next step"),
]
NS = "{http://www.w3.org/2000/svg}"
Rect = tuple[float, float, float, float]


def rects(picture: Picture, radius: str) -> list[Rect]:
    """Left, top, right, bottom of the rectangles with this corner radius: boxes have 7, labels 8."""
    found = ET.fromstring(picture.svg).iter(f"{NS}rect")
    numbers = [
        [float(r.get(k)) for k in ("x", "y", "width", "height")] for r in found if r.get("rx") == radius
    ]
    return [(x, y, x + w, y + h) for x, y, w, h in numbers]


def texts(picture: Picture) -> list[tuple[str, Rect]]:
    """Every text with the room that it takes at most."""
    placed = []
    for text in ET.fromstring(picture.svg).iter(f"{NS}text"):
        x, y, size = (float(text.get(k)) for k in ("x", "y", "font-size"))
        width = text_width(text.text, size, text.get("font-weight") == "bold")
        left = x - {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor")]
        placed.append((text.text, (left, y - 0.75 * size, left + width, y + 0.22 * size)))
    return placed


def overlap(a: Rect, b: Rect) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def inside(inner: Rect, outer: Rect, room: float = 0) -> bool:
    return (
        outer[0] + room <= inner[0]
        and inner[2] <= outer[2] - room
        and outer[1] <= inner[1]
        and inner[3] <= outer[3]
    )


def check(picture: Picture) -> None:
    boxes, pills = rects(picture, "7"), rects(picture, "8")
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', picture.svg).groups())
    for a, b in combinations(boxes + pills, 2):
        assert not overlap(a, b), "boxes and labels keep apart"
    for text, room in texts(picture):
        assert inside(room, (0, 0, width, height)), f"{text} leaves the picture"
        for box in boxes + pills:
            assert not overlap(room, box) or inside(room, box, room=4), f"{text} leaves its box"


def test_texts_fit_their_boxes_and_nothing_overlaps():
    picture = flow(LANES, ARROWS, "What does a step send to the GPU?")
    assert len(rects(picture, "7")) == 7 and len(rects(picture, "8")) == 5
    check(picture)


WORDS = st.text("abW_ m.[]×", min_size=1, max_size=40).filter(lambda text: text.strip(" *-"))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_flow_keeps_its_boxes_labels_and_texts_apart(data):
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    notes = data.draw(st.lists(WORDS, min_size=sum(counts), max_size=sum(counts)))
    names = [
        f"{mark}{i} {note}\n{note}" for i, (note, mark) in enumerate(zip(notes, "*- " * 9, strict=False))
    ]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    lanes = {f"lane {i}": names[a:b] for i, (a, b) in enumerate(zip(starts, starts[1:], strict=False))}
    ends = st.tuples(st.sampled_from(names), st.sampled_from(names), WORDS | st.just(""))
    arrows = data.draw(st.lists(ends, max_size=6, unique_by=lambda e: e[:2]))
    check(flow(lanes, arrows, "A title " * data.draw(st.integers(0, 20))))


def test_arrows_start_and_end_at_their_boxes():
    picture = flow({"CPU": ["a", "b"], "PCIe": ["c"], "GPU": ["d"]}, [("a", "d", "x"), ("d", "b", "")], "t")
    lines = [p.get("d") for p in ET.fromstring(picture.svg).iter(f"{NS}path") if p.get("fill") == "none"]
    heads = [p.get("d") for p in ET.fromstring(picture.svg).iter(f"{NS}path") if p.get("fill") != "none"]
    a, b, _, d = rects(picture, "7")

    def touches(at: str, box: Rect, y: float) -> bool:
        x, at_y = map(float, re.match(r"M(\S+) ([\d.]+)", at).groups())
        return box[0] < x < box[2] and at_y == pytest.approx(y, abs=0.2)

    assert touches(lines[0], a, a[3]) and touches(heads[0], d, d[1])
    assert touches(lines[1], d, d[1]) and touches(heads[1], b, b[3])


def test_what_flows_into_a_box_is_not_to_its_right_unless_it_is_a_return():
    picture = flow(
        {"CPU": ["a", "b"], "GPU": ["c", "d"]}, [("b", "c", ""), ("c", "d", ""), ("d", "a", "next step")], "t"
    )
    a, b, c, d = rects(picture, "7")
    assert a[0] < b[0] == c[0] < d[0]


def test_new_and_removed_boxes_differ_in_more_than_colour_and_are_explained():
    svg = flow({"CPU": ["a", "*b", "-c"]}, [], "t").svg
    assert svg.count('text-decoration="line-through"') == 1 and svg.count("stroke-dasharray") == 2
    assert ">new</text>" in svg and ">removed</text>" in svg
    assert ">new</text>" not in flow({"CPU": ["a"]}, [], "t").svg


def test_a_flow_is_described_in_words():
    words = flow({"CPU": ["*a\nsmall"], "GPU": ["-b"]}, [("a", "b", "ids")], "Why?").description
    assert words == "Why?\nCPU: a, small (new)\nGPU: b (removed)\n  a → b: ids"


@pytest.mark.parametrize(
    "lanes, arrows, told",
    [
        ({"CPU": ["a"]}, [("a", "z", "")], "no box is called 'z': there are a"),
        ({"CPU": ["a", "b"]}, [("a", "b", "x"), ("a", "b", "y")], "two arrows go from a to b"),
        ({"CPU": ["a"], "GPU": ["*a"]}, [], "two boxes have the same name: a"),
        ({"CPU": ["*"]}, [], r"a box needs a text, not '\*'"),
        ({"CPU": []}, [], "needs at least one box"),
    ],
)
def test_a_flow_that_contradicts_itself_is_refused(lanes, arrows, told):
    with pytest.raises(DiagramError, match=told):
        flow(lanes, arrows, "t")


def test_the_text_of_boxes_and_labels_contrasts_with_their_own_ground():
    root = ET.fromstring(flow(LANES, ARROWS, "t").svg)
    grounds = {r.get("fill") for r in root.iter(f"{NS}rect") if r.get("rx") in ("7", "8")} - {None}
    inks = {"#f6a04a": "#2b1a05", "#e9edf2": "#2a3038"}
    for ground in grounds - {"rgba(127,127,127,0.12)"}:
        pair = sorted((luminance(ground), luminance(inks.get(ground, "#ffffff"))))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, ground


def test_wrapped_lines_are_no_wider_than_asked_and_lose_nothing():
    text = "a decode_step_sessions_h2d_block_tables_with_a_very_long_name W ordinary words"
    lines = wrap(text, 100, 13)
    assert all(text_width(line, 13) <= 100 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_a_pool_shows_owners_fill_sharing_and_what_is_free():
    picture = block_pool({"A": [0, 3], "B": [0, 4]}, 6, {"A": 100, "B": 96}, 64)
    root = ET.fromstring(picture.svg)
    colours = [r.get("fill") for r in root.iter(f"{NS}rect") if r.get("rx") == "0"]
    assert colours[:4] == ["#366fae", "#f35e01"] * 2, "the shared block has stripes of both"
    full, part = (
        float(r.get("width"))
        for r in root.iter(f"{NS}rect")
        if r.get("rx") == "0" and r.get("height") == "42"
    )
    assert (full, part) == (pytest.approx(52 * 36 / 64, abs=0.1), pytest.approx(52 * 32 / 64, abs=0.1))
    assert "0 ×2" in [text for text, _ in texts(picture)]
    assert picture.description == (
        "A: 100 tokens in blocks [0, 3]\nB: 96 tokens in blocks [0, 4]\n"
        "  block 0: A, B, 64/64, 2 holders\n  block 3: A, 36/64\n  block 4: B, 32/64\n  free: 1, 2, 5"
    )


@pytest.mark.parametrize(
    "tables, lengths, told",
    [
        ({"A": [6]}, {"A": 1}, "A has block 6, but the pool has blocks 0 to 5"),
        ({"A": [0]}, {}, "the length of A is missing: there are none"),
        ({"A": [0]}, {"A": 65}, "A: 65 tokens do not fill 1 blocks of 64"),
        ({"A": [0, 1]}, {"A": 64}, "A: 64 tokens do not fill 2 blocks of 64"),
    ],
)
def test_a_pool_that_contradicts_its_tables_is_refused(tables, lengths, told):
    with pytest.raises(DiagramError, match=told):
        block_pool(tables, 6, lengths, 64)


def test_pictures_are_small_the_same_every_time_and_hold_no_scripts():
    pictures = [flow(LANES, ARROWS, "t") for _ in range(2)]
    assert pictures[0] == pictures[1]
    assert len(pictures[0].svg) < 9_000 and "script" not in pictures[0].svg
    assert pictures[0]._repr_mimebundle_() == {
        "image/svg+xml": pictures[0].svg,
        "text/plain": pictures[0].description,
    }
