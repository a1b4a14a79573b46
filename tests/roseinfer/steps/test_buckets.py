"""The sizes of captured steps and prefills."""

from __future__ import annotations

from rosellm.roseinfer.steps.captured_prefill import CAPTURED_TOKENS, bucket_of, places_for
from rosellm.roseinfer.steps.planner import batch_bucket, batch_buckets


def test_every_number_of_tokens_has_the_smallest_bucket_that_holds_it():
    buckets = sorted({bucket_of(n) for n in range(1, CAPTURED_TOKENS + 1)})
    large = [*range(384, 1024, 128), *range(1024, 2048, 256), *range(2048, CAPTURED_TOKENS + 1, 512)]
    assert buckets == [1 << i for i in range(9)] + large
    for n in range(1, CAPTURED_TOKENS + 1):
        assert bucket_of(n) == next(bucket for bucket in buckets if bucket >= n)


def test_the_batch_buckets_are_those_of_every_batch():
    for most in range(1, 700):
        assert batch_buckets(most) == sorted({batch_bucket(n) for n in range(1, most + 1)})


def test_a_choice_of_first_tokens_is_for_1_16_64_or_256_sequences():
    assert [places_for(n) for n in (1, 2, 16, 17, 64, 65, 256)] == [1, 16, 16, 64, 64, 256, 256]
