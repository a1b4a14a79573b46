"""Attention's programs over time: every token is read once, no processor idles while a program waits."""

from hypothesis import given, settings, strategies as st

from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.attention_plan import Variant

_programs = load_exhibit("programs")
deal, programs_of = _programs.deal, _programs.programs_of

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
