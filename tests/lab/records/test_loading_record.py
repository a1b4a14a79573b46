"""How loading is measured: a sharded checkpoint of random weights is written, loaded and removed."""

import json
import os
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from rosellm.errors import RoseError
from rosellm.lab.records import loading_record
from rosellm.lab.records.random_checkpoint import stored_tensors, write_checkpoint
from rosellm.models.checkpoint import load_config
from rosellm.models.families.table import KNOWN_SHAPES, write_arch
from rosellm.models.shards import shards_of
from rosellm.models.weights import load_model
from tests.helpers import CPU

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
SIZES = {"vocab_size": 4096, "n_layers": 4, "n_heads": 8, "n_kv_heads": 2, "head_dim": 64, "d_model": 512}
SMALL = replace(KNOWN_SHAPES["meta-llama/Llama-3.1-8B"], **SIZES, d_ff=2048, n_positions=1024, scale=None)
SLACK = 8 << 20


@pytest.fixture
def shape(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(write_arch(SMALL)))
    return folder


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B"])
def test_a_checkpoint_of_a_known_shape_holds_all_its_parameters(name):
    arch = KNOWN_SHAPES[name]
    assert sum(shape.numel() for _, shape in stored_tensors(arch)) == arch.n_parameters


def test_it_is_cut_into_shards_that_load_as_one_model(tmp_path):
    shards = write_checkpoint(SMALL, tmp_path, torch.bfloat16, 8 << 20, CPU)
    assert shards == shards_of(tmp_path) and len(shards) > 3
    assert all(shard.stat().st_size < (8 << 20) + 10_000 for shard in shards)
    assert load_config(tmp_path) == SMALL
    weights = load_model(str(tmp_path), CPU, torch.bfloat16).state_dict()
    assert all(0.015 < value.float().std() < 0.025 for value in weights.values() if value.dim() == 2)


@pytest.mark.slow
def test_the_command_records_seconds_and_memory_and_removes_the_checkpoint(shape, tmp_path, capsys):
    scratch, output = tmp_path / "scratch", tmp_path / "records"
    scratch.mkdir()
    asked = ["--model", str(shape), "--device", "cpu", "--scratch", str(scratch), "--output", str(output)]
    assert loading_record.main(asked) == 0
    assert not any(scratch.iterdir())
    record = json.loads((output / "small" / "loading.json").read_text())
    figures, n_bytes = record["figures"], 2 * SMALL.n_parameters
    assert record["environment"]["device_name"] and figures["weights_bytes"] == n_bytes
    most = n_bytes + figures["angles_bytes"] * 3 + figures["largest_tensor_bytes"] + SLACK
    for way in ("uncached", "cached"):
        assert 0.9 * n_bytes < figures[way]["anonymous_peak_bytes"] <= most
        assert figures[way]["rss_peak_bytes"] >= figures[way]["anonymous_peak_bytes"] - SLACK
        assert figures[way]["seconds"] > 0
    assert figures["dummy"]["anonymous_peak_bytes"] > 0.9 * n_bytes
    assert "uncached: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_peak_that_is_gone_at_the_end_is_seen():
    held = loading_record._in_new_process(partial(_two_copies, 64 << 20), CPU)
    assert held["anonymous_peak_bytes"] > 120 << 20


def _two_copies(n_bytes):
    kept = torch.ones(n_bytes, dtype=torch.uint8)
    both = kept.clone()
    return kept[: int(both[0])].clone()


@pytest.mark.slow
def test_a_loading_process_that_is_killed_is_told():
    with pytest.raises(RoseError, match="was killed"):
        loading_record._in_new_process(partial(os._exit, 9), CPU)


def test_a_full_disk_is_told_before_anything_is_written(shape, tmp_path, monkeypatch):
    monkeypatch.setattr(loading_record.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(RoseError, match=r"takes 0.0 GB .* has 0.0 GB free; name another folder"):
        loading_record.loading_figures(str(shape), CPU, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [(["--model", "nobody/knows"], "no shape is known"), (["--scratch", "/no/where"], "folder")],
)
def test_bad_input_is_one_line(asked, told, capsys):
    assert loading_record.main(["--device", "cpu", *asked]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and told in said


def test_a_record_that_cannot_be_written_is_told_before_anything_is_measured(
    shape, tmp_path, monkeypatch, capsys
):
    measured = []
    monkeypatch.setattr(loading_record, "loading_figures", lambda *given: measured.append(given))
    (tmp_path / "small" / "loading.json").mkdir()
    for output, told in ((tmp_path, "is not a regular file"), (shape / "config.json", "config.json")):
        assert loading_record.main(["--device=cpu", f"--model={shape}", f"--output={output}"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and told in said
    assert not measured


def test_an_unknown_model_leaves_no_folder(tmp_path):
    output = tmp_path / "records"
    assert loading_record.main(["--device=cpu", "--model=nobody/knows", f"--output={output}"]) == 2
    assert not output.exists()
