"""The benchmark of quantised weights: its record, and what it refuses."""

from __future__ import annotations

import json

from rosellm.bench import formats
from rosellm.bench.__main__ import main
from rosellm.bench.benchmark_scheduler import main as run_scheduler
from rosellm.bench.formats import FORMATS, PLAIN
from rosellm.models.loading import load_parts

CPU = ["formats", "--device", "cpu", "--rows", "1,2", "--new-tokens", "3", "--turns", "1"]


def test_the_record_has_speed_size_and_quality_of_every_format(tmp_path, capsys):
    path = tmp_path / "formats.json"
    names = [*FORMATS, "int8+kv-int8"]
    options = ["--windows", "2", "--formats", *names, "--json", str(path)]
    assert main([*CPU, "--model", "rose-tiny-qwen3", *options]) == 0
    found = json.loads(path.read_text())["figures"]
    assert all(list(own) == names for own in found["seconds"].values())
    model, _ = load_parts("rose-tiny-qwen3", "cpu", "float32")
    codes = model.config.n_layers * sum(n * k for n, k in model.config.shapes.values())
    sizes = found["weight_bytes"]
    assert sizes[PLAIN]["projections"] == 4 * codes
    assert sizes[PLAIN]["projections"] + sizes[PLAIN]["others"] == 4 * model.config.n_parameters
    quality = found["quality"]["formats"]
    for form, size, kl in (("fp8", 1, 0.1), ("int8", 1, 0.1), ("int4", 0.53125, 0.5)):
        assert size * codes <= sizes[form]["projections"] < 1.03 * size * codes
        spared = 3 * model.lm_head.weight.numel() - 4 * model.config.vocab_size  # its scales
        assert sizes[form]["others"] == sizes[PLAIN]["others"] - spared
        assert 0 < quality[form]["kl"] < kl
        assert abs(quality[form]["perplexity"] / quality[PLAIN]["perplexity"] - 1) < kl / 2
        one, two = (quality[f"{form}, activations of {n}"]["kl"] for n in ("1 digit", "2 digits"))
        assert 0.98 * quality[form]["kl"] < two < one
    assert quality[PLAIN]["kl"] == 0 and quality["int8"]["kl"] < quality["fp8"]["kl"] < quality["int4"]["kl"]
    assert 0 < quality["int4, calibrated"]["kl"] < 0.8 * quality["int4"]["kl"]
    assert 0 < quality["kv-int8"]["kl"] < quality["kv-fp8"]["kl"] < quality["int8+kv-int8"]["kl"] + 0.01
    assert "KL divergence" in capsys.readouterr().out


def test_the_workloads_of_models_are_measured(tmp_path, monkeypatch, capsys):
    """Each format by engines that have it; prompts count where each request has one new token."""
    made, path = [], tmp_path / "formats.json"
    load = formats.load_engine
    monkeypatch.setattr(
        formats, "load_engine", lambda *one, **own: made.append(load(*one, **own)) or made[-1]
    )
    options = ["--model", "rose-tiny", "--workloads", "TTFT64", "--turns", "1", "--json", str(path)]
    assert main(["formats", "--device", "cpu", *options, "--formats", "none", "int8+kv-fp8"]) == 0
    assert "TTFT64: tok/s none" in capsys.readouterr().out
    assert [(one.model.quantization, one.kv_form) for one in made] == [(None, None), ("int8", "fp8")]
    record = json.loads(path.read_text())
    assert record["figures"]["tokens"] == {"TTFT64": 64} and "new_tokens" not in record


def test_a_benchmark_has_the_formats_that_it_is_asked_for(tmp_path):
    path = tmp_path / "run.json"
    sizes = ["--num-requests", "2", "--max-new-tokens", "2", "--warmup-runs", "0", "--repeat-runs", "1"]
    chosen = ["--kv-cache-dtype", "int8", "--quantization", "fp8", "--paged-attn", "--cuda-graph"]
    options = ["--hf-model-id", "rose-tiny", "--device", "cpu", "--json", str(path)]
    assert run_scheduler([*options, *sizes, *chosen]) == 0
    record = json.loads(path.read_text())
    assert (record["kv_cache_dtype"], record["quantization"]) == ("int8", "fp8")


def test_an_unknown_format_and_two_of_a_kind_are_one_line(capsys):
    for name in ("fp8+int8", "kv-fp8+kv-int8", "none+fp8"):
        assert main([*CPU, "--formats", name]) == 2
        assert f"--formats: {name!r} names two formats of the same kind" in capsys.readouterr().err
    assert main([*CPU, "--formats", "none", "fp8+kv-int3"]) == 2
    assert (
        "--formats: 'kv-int3' is unknown; use none, fp8, int8, int4, kv-fp8, kv-int8"
        in capsys.readouterr().err
    )


def test_random_weights_have_no_quality(capsys):
    assert main([*CPU, "--load-format", "dummy", "--windows", "1"]) == 2
    assert "random weights have no quality" in capsys.readouterr().err
