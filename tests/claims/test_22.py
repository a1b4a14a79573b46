"""Notebook 22: the published figures of one stream of Llama-3.2-1B, and this engine's."""

from rosellm.lab.records.records import _rivals_file
from tests.claims.prose import claim, prose


def test_the_published_figures_and_ours_are_those_of_the_records():
    words = r"H200, ([\d.]+) µs a token were.*?and ([\d.]+) µs for a CUDA.*?takes (\d+) µs"
    rivals = _rivals_file()
    (published,) = rivals["modern_models"]["published"].values()
    kernel = published["HazyResearch megakernel, us a token"]
    graph = published["CUDA graph with programmatic dependent launch, us a token"]
    ours = rivals["one_lease_2026_11_26"]["llama_1b_protocol"]["decode only"]
    claim(prose("22"), words, kernel, graph, ours)
