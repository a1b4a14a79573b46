"""The exhibit of speculation: a replay takes the engine's steps, and figures are those of the records."""

from __future__ import annotations

import json

import pytest

from rosellm.lab.records.bench import get_parts
from rosellm.lab.records.records import Results, find
from rosellm.models.checkpoint import DRAFT_OF
from rosellm.roseinfer.exhibits import load_exhibit

speculation = load_exhibit("speculation")


@pytest.mark.parametrize("n_drafts", [1, 7])
def test_a_replay_takes_the_steps_of_the_engine_which_gives_the_tokens_of_single_steps(n_drafts):
    model, tokenizer = get_parts("rose-tiny", "cpu", "float32")
    prompts = [tokenizer.encode(text) for text in speculation.TEXTS.values()]
    plain = speculation.generate(model, tokenizer, prompts, 24)
    assert plain.counts == [[1, 1, 1]] * 23
    for prompt, answer in zip(prompts, plain.tokens, strict=True):
        run = speculation.generate(model, tokenizer, [prompt], 24, n_drafts)
        found = speculation.replay(speculation.matched, prompt, answer, n_drafts)
        assert run.tokens == [answer]
        assert run.counts == [[n + 1] for n in found.accepted]
        assert found.tokens_per_step == 23 / len(run.counts)
    together = speculation.generate(model, tokenizer, prompts, 24, n_drafts)
    assert together.tokens == plain.tokens
    assert sum(map(sum, together.counts)) == 3 * 23


def test_a_replay_counts_drafts_up_to_the_first_that_is_wrong():
    tried = iter([[5, 6], [0, 8], [], None, [1]])
    found = speculation.replay(lambda tokens, most: next(tried), [1, 2], [4, 5, 6, 7, 8, 9, 9, 9], 2)
    assert (found.drafted, found.accepted) == ([2, 2, 0, 0, 0], [2, 0, 0, 0, 0])
    assert found.tokens_per_step == 7 / 5
    assert found.percent_accepted(1) == found.percent_accepted(2) == 50
    assert found.percent_accepted(3) is None
    assert speculation.Replay().tokens_per_step == 1


def test_words_are_drafted_from_the_latest_of_the_longest_matches():
    assert speculation.draft_words("a b c a b d a b", 2) == "d a"
    assert speculation.draft_words("x a b c y a b x a b", 1) == "c"
    assert speculation.draft_words("a b a b", 5) == "a b a b a"
    assert speculation.draft_words("a b c", 5) == ""


def test_the_gain_is_that_of_all_accepted_or_none_at_the_ends():
    us = {1: 100.0, 2: 110.0, 8: 160.0, 16: 320.0}
    assert speculation.expected_gain(us, 7, 1.0) == 8 * 100 / 160
    assert speculation.expected_gain(us, 1, 0.0) == 100 / 110
    assert speculation.expected_gain(us, 1, 0.5, sequences=8) == 1.5 * 160 / 320
    assert speculation.expected_gain(us, 3, 0.5) is None


def test_a_model_that_drafts_gives_the_same_tokens_and_draws_with_the_noise_of_the_other():
    model, tokenizer = get_parts("rose-tiny", "cpu", "float32")
    small, _ = get_parts(DRAFT_OF["rose-tiny"], "cpu", "float32")
    prompts = [tokenizer.encode(text) for text in speculation.TEXTS.values()]
    plain = speculation.generate(model, tokenizer, prompts, 24, temperature=0.8)
    drafting = speculation.generate(model, tokenizer, prompts, 24, 7, small, temperature=0.8)
    assert drafting.tokens == plain.tokens and len(drafting.counts) < len(plain.counts)
    given = prompts, plain.tokens, 0.8
    assert speculation.percent_drawn(model, *given) == 100
    assert speculation.percent_drawn(model, *given, other_seeds=3) < 80
    assert 0 < speculation.percent_drawn(small, *given, other_seeds=None) < 100


def test_every_recorded_size_has_steps_without_and_with_drafts():
    sizes = speculation.sizes(find())
    assert {model for model, _ in sizes} == {"Llama-3.1-8B", "Llama-3.2-1B", "Qwen3-0.6B"}
    for key in sizes:
        found = speculation.verified_us(find(), *key)
        assert set(found) in ({1, 3, 7, 15}, {1, 3})
        assert all(min(plain_and_verify_us) > 0 for plain_and_verify_us in found.values())


def test_a_gain_is_the_time_without_drafts_over_that_with_drafts(tmp_path):
    seconds = {"1": {"plain": [2, 3, 9], "ngram": [1, 1, 5], "draft": [4, 6, 7]}}
    record = {"figures": {"edit": {"seconds": seconds}}}
    (tmp_path / "drafts-m.json").write_text(json.dumps(record))
    gains = speculation.recorded_gains(Results(tmp_path), "m", "edit")
    assert gains == {"ngram": [3], "draft": [0.5]}
