"""The comparison with other engines: same requests, same clock, turns taken, records that say what ran."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch

from rosellm.bench import benchmark_rivals as rivals
from rosellm.bench.benchmark_rivals import (
    RIVALS,
    THROUGHPUT,
    Rival,
    RivalError,
    Task,
    comparison,
    measure_workload,
    run_in_turns,
    workload_options,
)
from rosellm.bench.prompts import request_params
from rosellm.bench.record import across_repeats
from rosellm.models.weights import save_model
from tests.helpers import CPU, MODERN, random_model, random_prompts, refusal, small_config, uncached_greedy

SMALL = "--num-requests 3 --max-new-tokens 6 --max-batch-size 2 --repeat-runs 2 --device cpu"


def make_task(checkpoint, prompts, new_tokens: int, batch: int, dtype=torch.float32, **more) -> Task:
    sizes = {"num_requests": len(prompts), "max_new_tokens": new_tokens, "max_batch_size": batch}
    argv = ["--rival=rosellm", "--workloads=W1", "--device=cpu"]
    options = workload_options(rivals.parse_options(argv), "W1")
    return Task(checkpoint, CPU, dtype, Namespace(**(vars(options) | sizes | more)), prompts)


def scripted(name: str, log: list[str], answer: list[list[int]] | None = None) -> Callable[[Task], Rival]:
    """A rival that logs what is asked of it and answers zeros, or ``answer``."""

    def start(task: Task) -> Rival:
        zeros = [[0] * task.options.max_new_tokens for _ in task.prompts]

        def generate() -> list[list[int]]:
            log.append(name)
            return answer or zeros

        return Rival(generate, {"rival_version": "0"}, lambda: log.append(f"{name} closed"))

    return start


@pytest.fixture
def scripted_task(tmp_path) -> Task:
    return make_task(tmp_path, [[1], [2], [3]], new_tokens=4, batch=2)


# Rivals.


@pytest.mark.parametrize("shape", [{}, MODERN], ids=["gpt2", "modern"])
@pytest.mark.parametrize("name", ["transformers", "rosellm"])
def test_a_rival_continues_unequal_prompts_in_order_through_the_end_of_sequence(name, shape, tmp_path):
    prompts = random_prompts([1, 4, 2, 7, 3])
    plain = random_model(0, small_config(**shape))
    eos = uncached_greedy(plain, prompts[0], 8)[2]
    gpt = random_model(0, small_config(eos_token_ids=(eos,), **shape))
    save_model(gpt, tmp_path, torch.float32)
    rival = RIVALS[name](make_task(tmp_path, prompts, new_tokens=8, batch=2))
    expected = [uncached_greedy(plain, prompt, 8) for prompt in prompts]
    assert eos in expected[0][:-1]
    assert rival.generate() == expected
    assert rival.generate() == expected
    assert rival.facts["rival_version"]


@pytest.fixture
def vllm(monkeypatch) -> MagicMock:
    """A module of that name, whose engine answers 7, 8, 9 to every prompt."""
    module, answer = MagicMock(SamplingParams=dict), SimpleNamespace(token_ids=(7, 8, 9))
    module.LLM.return_value.generate.return_value = [SimpleNamespace(outputs=[answer])] * 2
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(rivals, "version", lambda name: {"vllm": "0.22.1"}[name])
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    return module


def test_vllm_gets_token_ids_and_sampling_has_its_cache_emptied_and_is_shut_down(vllm, tmp_path):
    sampling = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    options = {"new_tokens": 3, "batch": 2, "dtype": torch.float16, "prefix_cache": True, **sampling}
    task = make_task(tmp_path, [[5], [6, 7]], **options)
    rival = RIVALS["vllm"](task)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert rival.generate() == [[7, 8, 9]] * 2
    arguments = {"dtype": "float16", "max_num_seqs": 2, "enable_prefix_caching": True}
    arguments["skip_tokenizer_init"] = True
    vllm.LLM.assert_called_once_with(model=str(tmp_path), **arguments)
    same = sampling | {"max_tokens": 3, "ignore_eos": True, "detokenize": False}
    params = [same | {"seed": own.seed} for own in request_params(task.options)]
    prompts, engine = [{"prompt_token_ids": [5]}, {"prompt_token_ids": [6, 7]}], vllm.LLM.return_value
    generated = call.generate(prompts, params, use_tqdm=False)
    assert engine.method_calls == [call.reset_prefix_cache(), generated]
    assert rival.facts == {"rival_version": "0.22.1", "llm_arguments": arguments}
    rival.close()
    engine.llm_engine.engine_core.shutdown.assert_called_once_with()


def test_transformers_cannot_sample_with_a_seed_a_request_nor_end_some_of_a_batch(tmp_path):
    for more, told in (
        ({"temperature": 0.6}, "a seed of its own"),
        ({"min_new_tokens": 1, "num_requests": 9}, "requests of unequal lengths"),
    ):
        with pytest.raises(RivalError, match=told):
            RIVALS["transformers"](make_task(tmp_path, [[1], [2]], new_tokens=4, batch=2, **more))


# Turns, clock, records.


def test_rivals_take_turns_run_by_run(scripted_task):
    log = []
    both = {name: scripted(name, log)(scripted_task) for name in ("a", "b")}
    runs = run_in_turns(both, scripted_task)
    assert log == ["a", "b"] * 4
    assert {name: len(ones) for name, ones in runs.items()} == {"a": 3, "b": 3}
    for figures in runs["a"] + runs["b"]:
        assert figures["completion_tokens"] == 12
        assert figures["total_throughput_tok_s"] == 12 / figures["total_time_s"]


def test_a_rival_that_makes_fewer_tokens_is_not_measured_and_all_are_closed(scripted_task, monkeypatch):
    log, short = [], [[0] * 3] * 3
    monkeypatch.setattr(rivals, "RIVALS", {"a": scripted("a", log), "b": scripted("b", log, short)})
    with pytest.raises(RuntimeError, match="9 tokens were generated, 12 were requested"):
        measure_workload(scripted_task, ["a", "b"], small_config())
    assert log == ["a", "b", "b closed", "a closed"]


def test_the_ratio_is_to_the_first_rival():
    figures = {"a": [100.0], "b": [110.0, 150.0, 90.0]}
    results = {name: across_repeats([{THROUGHPUT: one} for one in own]) for name, own in figures.items()}
    records = [{"rival": name, "results": {"offline": result}} for name, result in results.items()]
    assert comparison(records).splitlines() == [
        "  a: 100.0 tokens/s (100.0 to 100.0), 1.00x",
        "  b: 110.0 tokens/s (90.0 to 150.0), 1.10x",
    ]


@pytest.mark.slow
def test_the_command_measures_every_workload_by_every_rival(tmp_path, capsys):
    folder = tmp_path / "new" / "records"
    command = f"--rival transformers,rosellm --workloads W1,W4 {SMALL} --rung paged --output {folder}"
    assert rivals.main(command.split()) == 0
    told = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["W1:", "transformers:", "rosellm:", "W4:", "transformers:", "rosellm:"]
    records = {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}
    assert sorted(records) == ["W1-rosellm", "W1-transformers", "W4-rosellm", "W4-transformers"]
    for record in records.values():
        assert (record["schema_version"], record["kind"]) == (1, "rivals")
        assert (record["options"]["num_requests"], record["options"]["max_new_tokens"]) == (3, 6)
        assert (record["model"], record["device"], record["dtype"]) == ("rose-tiny", "cpu", "float32")
        assert [r["completion_tokens"] for r in record["results"]["offline"]["repeats"]] == [18, 18]
        assert record["environment"]["torch"] == torch.__version__
        assert str(tmp_path) not in json.dumps(record)
    assert records["W4-rosellm"]["rung"] == "paged"
    first = {name: record["results"]["offline"]["repeats"][0] for name, record in records.items()}
    assert first["W4-rosellm"]["tokens_sha256"] == first["W4-transformers"]["tokens_sha256"]
    assert first["W4-rosellm"]["tokens_sha256"] != first["W1-rosellm"]["tokens_sha256"]


@pytest.mark.parametrize(
    ("names", "installed", "wanted"),
    [
        ("vllm", (), "rival vllm is not installed; pip install vllm, or leave it out"),
        ("rosellm,transformers", ("rosellm",), "rival transformers is not installed"),
        ("vllm,rosellm", ("vllm", "rosellm"), "run it without others"),
    ],
)
def test_a_rival_that_cannot_run_here_is_told_before_anything_is_loaded(
    names, installed, wanted, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(rivals, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(rivals, "load_parts", lambda *_: pytest.fail("a model was loaded"))
    argv = ["--device=cpu", f"--rival={names}", "--workloads=W1", f"--output={tmp_path / 'records'}"]
    assert wanted in refusal(rivals.main, argv, capsys)
    assert not (tmp_path / "records").exists()


@pytest.mark.gpu
def test_on_a_gpu_rivals_agree_in_fp32(tmp_path):
    sizes = "--num-requests 5 --max-new-tokens 8 --max-batch-size 3 --repeat-runs 2"
    command = f"--rival transformers,rosellm --workloads W4 {sizes} --dtype float32 --device cuda"
    assert rivals.main([*command.split(), "--output", str(tmp_path)]) == 0
    records = [json.loads((tmp_path / f"W4-{name}.json").read_text()) for name in ("transformers", "rosellm")]
    assert {record["device"] for record in records} == {"cuda"}
    assert len({record["results"]["offline"]["repeats"][0]["tokens_sha256"] for record in records}) == 1
