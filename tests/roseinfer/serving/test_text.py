"""Text: decoded token by token, ended by stop strings and by the end of sequence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from rosellm.errors import PromptError, SamplingError
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from rosellm.roseinfer.text import IncrementalText
from tests.helpers import random_model, small_config, small_engine, uncached_greedy
from tests.roseinfer.serving.common import engine_of, greedy


class Pieces:
    """A tokenizer whose token i is the i-th of the given strings."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def stream(self, prompt: object = (), skip_special: bool = True) -> Pieces:
        return self

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return ""


def before_first_stop(text: str, stops: tuple[str, ...], n_free: int) -> tuple[str, bool]:
    """Character by character: the text before the stop string completed first after ``n_free`` characters."""
    for end in range(n_free + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - len(max(ending, key=len))], True
    return text, False


words = st.text(alphabet="ab", min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(words, max_size=8), stops=st.lists(words, max_size=3), least=st.integers(0, 3))
def test_text_ends_before_the_first_stop_after_min_tokens_wherever_tokens_break(pieces, stops, least):
    stops = tuple(stops)
    expected, stopped = before_first_stop("".join(pieces), stops, len("".join(pieces[:least])))
    text = IncrementalText(Pieces(pieces), [], stops, min_tokens=least)
    taken = []
    for i in range(len(pieces)):
        text.push(i)
        taken.append(text.take())
        assert expected.startswith("".join(taken))
        assert stops or taken[i] == pieces[i]  # nothing is held back
        if text.stopped:
            break
    text.finish()
    taken.append(text.take())
    assert ("".join(taken), text.text, text.stopped is not None) == (expected, expected, stopped)


@pytest.mark.parametrize("rung", ["dense", BEST_RUNG])
def test_the_first_of_several_ends_of_sequence_stops_a_request(rung):
    prompts = [[9, 8], [3], [5, 6, 7], [40, 2, 1, 8]]
    plain = [uncached_greedy(random_model(0), prompt, 12) for prompt in prompts]
    ends = plain[0][4], plain[2][1], plain[3][6]
    lengths = [next((i + 1 for i, token in enumerate(row) if token in ends), 12) for row in plain]
    engine = small_engine(random_model(0, small_config(eos_token_ids=ends)), recipe=rung)
    outputs = OfflineScheduler(engine).run(prompts, SamplingParams(temperature=0.0, max_tokens=12))
    assert [output.token_ids for output in outputs] == [
        row[:n] for row, n in zip(plain, lengths, strict=True)
    ]
    assert len({output.token_ids[-1] for output in outputs if output.finish_reason == "stop"}) >= 2
    ignoring = OfflineScheduler(engine).run(prompts, greedy(12))
    assert [output.token_ids for output in ignoring] == plain


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string():
    engine = engine_of()
    assert OfflineScheduler(engine).run([[1]], greedy(2))[0].text is None
    with pytest.raises(SamplingError, match="stop strings need a tokenizer"):
        OnlineScheduler(engine).add_request([1], greedy(2, stop="x"))
    with pytest.raises(PromptError, match="a prompt of text needs a tokenizer"):
        engine.encode("x")
