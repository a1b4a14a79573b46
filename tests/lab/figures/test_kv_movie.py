"""The film of the pool: every change of a block is found, told and drawn where the block is."""

import xml.etree.ElementTree as ET
from functools import cache

import ipywidgets
import pytest

from rosellm.lab.figures import kv_movie
from rosellm.lab.figures.kv_movie import KINDS, KVMovie, MovieError, Player
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from tests.helpers import random_model, random_prompts, small_engine

NS = "{http://www.w3.org/2000/svg}"
GPT = random_model(0)
SHORT, LONG = random_prompts([10, 30], seed=1)


@cache
def film(rung: str = "paged") -> KVMovie:
    """Blocks of 8: a prompt, one that begins like it, and one that needs what the cache holds."""
    movie = KVMovie(OnlineScheduler(small_engine(GPT, recipe=rung, num_kv_blocks=9, prefix_cache=True)))
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for prompt, steps in ((SHORT, 3), (SHORT + LONG[:2], 6), (LONG, None)):
        movie.scheduler.add_request(prompt, params)
        movie.run(steps)
    return movie


def said(movie: KVMovie, kind: str) -> list[str]:
    return [change.said for frame in movie.frames for change in frame.changes if change.kind == kind]


def test_every_kind_of_change_is_found_where_it_happens():
    movie = film()
    assert said(movie, "allocation")[:2] == [
        "request 1 takes blocks 0, 1 for its 10 tokens",
        "request 2 takes block 3 for the rest of its 12 tokens",
    ]
    assert said(movie, "caching")[0] == "the cache keeps blocks 0, 1 as prefix 1, 10 tokens"
    assert said(movie, "copy on write")[0] == "request 1 copies shared block 1 to 2 before it writes"
    assert said(movie, "sharing") == ["request 2 shares block 0, computed before"]
    assert said(movie, "rollover")[0].endswith(": block 2 is full")
    assert said(movie, "free")[0].startswith("request 1 has finished and lets go of blocks 0, 2")
    assert said(movie, "eviction")[0].startswith("prefix 1 is evicted and lets go of blocks 0, 1")
    assert movie.steps_of("sharing") == [4] and movie.steps_of("preemption") == []


@pytest.mark.parametrize("rung", ["dense", "paged", BEST_RUNG])
def test_each_block_has_as_many_holders_as_tables_name_it(rung):
    for frame in film(rung).frames:
        held = [block for blocks in frame.tables.values() for block in blocks]
        assert frame.refs == {block: held.count(block) for block in set(held)}


def test_every_change_of_a_table_is_told():
    frames = film().frames
    for old, new in zip(frames, frames[1:], strict=False):
        changed = {name for name in old.tables | new.tables if old.tables.get(name) != new.tables.get(name)}
        told = " ".join(change.said for change in new.changes)
        assert all(name in told for name in changed) and bool(changed) == bool(new.changes)


def test_a_preempted_request_is_told_from_a_finished_one():
    movie = KVMovie(OnlineScheduler(small_engine(GPT, recipe="paged", num_kv_blocks=5)))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    movie.scheduler.add_requests(random_prompts([3, 9, 1], seed=3), params)
    movie.run()
    assert said(movie, "allocation")[0] == "request 1 takes block 0 for its 3 tokens"
    assert "request 3 takes block 2 for its 1 token" in said(movie, "allocation")
    assert said(movie, "preemption")[0].startswith("request 2 is preempted and lets go of blocks ")
    assert movie.scheduler.preemptions == len(said(movie, "preemption"))
    assert not movie.frames[-1].tables and movie.log.moments[-1].free == 5


def test_the_blocks_that_changed_are_outlined_where_the_pool_draws_them():
    movie = film()
    for step, frame in enumerate(movie.frames):
        root = ET.fromstring(movie.picture(step).svg)
        rects = list(root.iter(f"{NS}rect"))
        outlined = {
            (float(r.get("x")) + 3, float(r.get("y")) + 3) for r in rects if r.get("stroke-width") == "3"
        }
        drawn = {(float(r.get("x")), float(r.get("y"))) for r in rects if r.get("width") == "52"}
        assert outlined <= drawn
        assert len(outlined) == len({block for change in frame.changes for block in change.blocks})


def test_all_frames_are_of_one_size_and_everybody_keeps_a_row():
    movie = film()
    pictures = movie._pictures(range(len(movie.frames)))
    roots = [ET.fromstring(picture.svg) for picture in pictures]
    assert len({root.get("viewBox") for root in roots}) == 1
    for root in roots:
        rows = [t.text for t in root.iter(f"{NS}text") if (t.text or "").startswith(("request", "prefix"))]
        assert [row for row in rows if len(row.split()) == 2] == [
            *("request 1", "request 2", "request 3"),
            *("prefix 1", "prefix 2", "prefix 3"),
        ]


def test_the_contact_sheet_has_the_first_frame_of_each_kind():
    movie, sheet = film(), film().sheet()
    firsts = {movie.steps_of(kind)[0] for kind in KINDS if movie.steps_of(kind)}
    ET.fromstring(sheet.svg)
    for step in range(len(movie.frames)):
        assert (f"Step {step} of {len(movie.frames) - 1}\n" in sheet.description) == (step in firsts)
    assert len(sheet.svg) < 70_000


def test_a_film_runs_no_further_than_asked():
    movie = KVMovie(OnlineScheduler(small_engine(GPT, recipe="paged")))
    assert len(movie.run().frames) == 1
    movie.scheduler.add_request(SHORT, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert len(movie.run(3).frames) == 4 and movie.scheduler.has_unfinished
    assert "nothing is cached yet" in movie.picture(0).description


def test_what_is_not_in_the_film_is_refused():
    with pytest.raises(MovieError, match="no step 99; the film has steps 0 to"):
        film().picture(99)
    with pytest.raises(MovieError, match="'growth' never happens to a block; these do: allocation, "):
        film().steps_of("growth")


def test_the_play_button_and_the_slider_move_together():
    player = Player(ipywidgets.IntSlider(value=2, min=0, max=5))
    play, slider = player.children
    assert (play.value, slider.value, player.value, play.max) == (2, 2, 2, 5)
    play.value = 4
    assert (slider.value, player.value) == (4, 4)
    slider.value = 1
    assert (play.value, player.value) == (1, 1)


def test_playing_shows_the_frame_of_the_chosen_step(monkeypatch):
    shown, asked = [], {}
    monkeypatch.setattr(kv_movie, "display", shown.append)
    monkeypatch.setattr(kv_movie, "explore", lambda draw, **controls: asked.update(controls, draw=draw))
    film().play(first=1)
    player = asked["step"].widget()
    assert isinstance(player, Player) and (player.value, player.children[0].max) == (
        1,
        len(film().frames) - 1,
    )
    asked["draw"](step=4)
    assert shown == [film().picture(4)] and "request 2 shares block 0" in shown[0].description
