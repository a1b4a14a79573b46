"""Attention's programs over time: every token is read once, nobody idles while a program waits."""

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings, strategies as st

from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.attention_plan import Variant, cut_rows, whole_rows

_programs = load_exhibit("programs")
COLOURS, LONGEST, OTHERS = _programs.COLOURS, _programs.LONGEST, _programs.OTHERS
deal, programs_of, timeline = _programs.deal, _programs.programs_of, _programs.timeline

some_lengths = st.lists(st.integers(1, 200), min_size=1, max_size=9)
variants = st.builds(Variant, st.sampled_from((16, 64)), st.integers(0, 12), lead=st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(some_lengths, variants, st.integers(1, 3))
def test_programs_read_every_token_of_each_row_once_for_each_head(lengths, variant, heads):
    read = [0] * len(lengths)
    launched = programs_of(lengths, variant, heads)
    for row, tokens in (part for parts in launched for part in parts):
        read[row] += tokens
    assert read == [heads * n for n in lengths]
    assert len(launched) == heads * (variant.pieces or len(lengths))


@settings(max_examples=60, deadline=None)
@given(some_lengths, variants, st.integers(1, 3), st.integers(1, 9))
def test_a_processor_runs_one_program_at_a_time_and_none_idles_while_one_waits(lengths, variant, heads, n):
    dealt = deal(lengths, variant, heads, n)
    until = [0] * n
    for one in dealt.programs:  # in the order of the launch
        assert one.start == until[one.processor] == min(until)
        until[one.processor] += one.tokens
    assert dealt.end == max(until)
    assert dealt.fair <= dealt.end <= dealt.fair + dealt.longest


def test_a_long_row_keeps_a_whole_launch_waiting_and_pieces_end_together():
    lengths = [137] * 7 + [960]
    whole, cut = (deal(lengths, choose(8, 12, 960, 132), 12, 132) for choose in (whole_rows, cut_rows))
    assert whole.longest == whole.end == 960 and whole.fair == cut.fair
    assert cut.longest <= 32 and cut.end < 1.15 * cut.fair


def bars(panel):
    """Lane, start, end and colour of every bar of a panel, whose lanes are stacked in the order given."""
    until, drawn = Counter(), []
    for lane, tokens, kind in zip(panel.y, panel.x, panel.marker.color, strict=True):
        drawn.append((int(lane), until[lane], until[lane] + int(tokens), COLOURS[kind]))
        until[lane] += int(tokens)
    return drawn


def test_every_program_is_a_bar_in_the_lane_of_its_processor_and_the_longest_row_stands_out():
    lengths, heads, processors = [40, 200, 30], 2, 4
    variants = {"whole": Variant(16), "cut": Variant(16, 5)}
    ways = {name: deal(lengths, variant, heads, processors) for name, variant in variants.items()}
    chart = timeline(ways, "t")
    assert chart.layout.barmode == "stack"
    for panel, dealt in zip(chart.data, ways.values(), strict=False):
        drawn, top = bars(panel), min(panel.y)
        assert [(lane - top, start, end) for lane, start, end, _ in drawn] == [
            (one.processor, one.start, one.end) for one in dealt.programs
        ]
        for (*_, colour), one in zip(drawn, dealt.programs, strict=True):
            assert (colour in COLOURS[2:]) == any(row == 1 for row, _ in one.parts)
        for (lane, *_, colour), (other, *_, next_colour) in pairwise(sorted(drawn, key=lambda bar: bar[:2])):
            assert lane != other or colour != next_colour  # neighbours can be told apart
    assert max(chart.data[0].y) < min(chart.data[1].y)  # one panel below the other
    assert [bar.name for bar in chart.data if bar.showlegend is None] == [LONGEST, OTHERS]
    assert all(line.x0 == line.x1 == ways["cut"].fair for line in chart.layout.shapes)
