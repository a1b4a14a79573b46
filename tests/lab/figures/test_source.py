"""What notebooks show of the package's source."""

import functools

import pytest

from rosellm.lab.figures.source import SourceError, source_of
from rosellm.roseinfer import kv_append_triton
from rosellm.rosetrainer import paged_attention


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
