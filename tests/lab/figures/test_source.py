"""What notebooks show of the package's source."""

import functools

import pytest

from rosellm.lab.figures import source
from rosellm.lab.figures.source import SourceError, show_pair, show_source, source_of
from rosellm.ladder.dense import Dense, dense_mask
from rosellm.roseinfer import kv_append_triton
from rosellm.rosetrainer import paged_attention


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(source, "display", lambda markdown: texts.append(markdown.data))
    return texts


class Outer:
    """A class to take members from."""

    @property
    def doubled(self) -> int:
        return 2

    @staticmethod
    @functools.lru_cache
    def cached(x: int) -> int:
        return x

    def plain(self) -> int:
        return 1


def test_a_function_is_shown_with_its_name_and_file_and_no_line_number(shown):
    show_source(dense_mask)
    (text,) = shown
    heading, fence, code = text.split("\n")[:3]
    assert (heading, fence) == ("`dense_mask` · `rosellm/ladder/dense.py`", "```python")
    assert code.startswith("def dense_mask(") and text.endswith("```")


def before(x: int) -> int:
    doubled = 2 * x

    return doubled


def after(x: int) -> int:
    doubled = 2 * x

    return doubled + 1


def test_a_pair_is_one_block_that_marks_exactly_the_lines_that_differ(shown):
    show_pair(before, after)
    (text,) = shown
    heading, fence, *lines, end = text.splitlines()
    assert heading.startswith("`before` · ") and " → `after` · " in heading
    assert (fence, end) == ("```diff", "```")
    assert lines == [
        "- def before(x: int) -> int:",
        "+ def after(x: int) -> int:",
        "      doubled = 2 * x",
        "",
        "-     return doubled",
        "+     return doubled + 1",
    ]


def test_sources_that_share_little_stand_one_below_the_other(shown):
    show_pair(before, dense_mask)
    (text,) = shown
    assert text.count("```python") == 2 and "```diff" not in text


def test_a_method_is_found_behind_its_decorators_and_not_indented(shown):
    show_source(Dense.decode)
    assert shown[0].splitlines()[0] == "`Dense.decode` · `rosellm/ladder/dense.py`"
    assert shown[0].splitlines()[2:4][0] == "@torch.inference_mode()"
    assert "\ndef decode(" in shown[0]


def test_only_the_members_named_are_shown_in_the_order_named():
    text = source_of(Outer, only=("plain", "doubled", "cached"))
    assert text.startswith("class Outer:\n    ...\n\n    def plain(self)")
    assert text.index("plain") < text.index("    @property\n    def doubled") < text.index("@staticmethod")
    assert "A class to take" not in text


def test_triton_kernels_are_shown_as_written_also_behind_an_autotuner():
    text = source_of(kv_append_triton._kv_append_kernel)
    assert text.startswith("@triton.jit") and "def _kv_append_kernel(" in text
    tuner = paged_attention.make_autotuned_paged_attention_decode(lambda *_a, **_k: 1.0).tuner
    assert "def _paged_attention_decode_kernel(" in source_of(tuner)


@pytest.mark.parametrize("one", [len, 3, type("Made", (), {})])
def test_what_has_no_source_is_refused(one):
    with pytest.raises(SourceError, match="has no Python source to show"):
        source_of(one)


def test_a_member_that_the_class_does_not_define_is_refused_with_those_it_does():
    with pytest.raises(SourceError, match="Outer does not define nothing: there are doubled, cached, plain"):
        source_of(Outer, only=("nothing",))
