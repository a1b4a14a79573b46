"""The picture of a KV pool: owners, fill, sharing, and the same in words."""

import xml.etree.ElementTree as ET

import pytest

from rosellm.roseinfer.exhibits import load_exhibit

_blocks = load_exhibit("blocks")
DiagramError, block_pool = _blocks.DiagramError, _blocks.block_pool


NS = "{http://www.w3.org/2000/svg}"


def test_a_pool_shows_owners_fill_sharing_and_what_is_free():
    picture = block_pool({"A": [0, 3], "B": [0, 4]}, 6, {"A": 100, "B": 96}, 64, "A <pool>")
    root = ET.fromstring(picture.svg)
    owned = [r for r in root.iter(f"{NS}rect") if r.get("rx") == "0"]
    colours = [r.get("fill") for r in owned]
    assert colours[:4] == ["#366fae", "#f35e01"] * 2, "the shared block has stripes of both"
    full, part = (float(r.get("width")) for r in owned if r.get("height") == "42")
    assert (full, part) == (pytest.approx(52 * 36 / 64, abs=0.1), pytest.approx(52 * 32 / 64, abs=0.1))
    assert "0 ×2" in [text.text for text in root.iter(f"{NS}text")]
    assert picture._repr_mimebundle_() == {
        "image/svg+xml": picture.svg,
        "text/plain": "A <pool>\nA: 100 tokens in blocks [0, 3]\nB: 96 tokens in blocks [0, 4]\n"
        "  block 0: A, B, 64/64, 2 holders\n  block 3: A, 36/64\n  block 4: B, 32/64\n  free: 1, 2, 5",
    }


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
        block_pool(tables, 6, lengths, 64, "t")
