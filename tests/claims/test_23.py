"""Notebook 23: why tokens of two rungs differ in 16 bits, as the record of equal tokens shows."""

import math

import torch

from rosellm.lab.records.records import find
from tests.claims.prose import claim, prose, said
from tests.claims.reading import number

TEXT, KINDS = prose("23"), find().figures("equality")
RUNG = "dependent_launch"


def test_bits_and_distances_are_those_of_the_formats():
    words = r"bfloat16 number has (\d+) .*float16 number (\d+): between 8 and 16, .* at least 1/(\d+) apart"
    coarse, fine, parts = map(number, said(TEXT, words))
    formats = torch.bfloat16, torch.float16
    assert [1 - math.log2(torch.finfo(one).eps) for one in formats] == [coarse, fine]
    assert torch.nextafter(torch.tensor(8.0).bfloat16(), torch.tensor(9.0).bfloat16()) == 8 + 1 / parts


def test_near_ties_and_equal_choices_are_those_recorded():
    one, words = KINDS["bfloat16"][RUNG], r"tokens before, ([\d.]+) % of the bfloat16 choices agree"
    claim(TEXT, words, 100 * one["share_of_argmax_equal"])
    assert one["smallest_gap_of_reference"] == 0 and one["gap_at_first_difference"] == 1 / 16
    sequences, tokens = map(number, said(TEXT, r"of (\d+) sequences of `rose-tiny` with (\d+) new"))
    shares = [sequences * tokens * kind[RUNG]["share_of_tokens_equal"] for kind in KINDS.values()]
    assert shares == [round(one) for one in shares]
