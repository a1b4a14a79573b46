"""Programs written for vLLM and nano-vllm run unchanged if ``rosellm`` has their name."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rosellm
from rosellm.errors import SamplingError
from rosellm.models.checkpoint import SHIPPED, SHIPPED_MODELS, checkpoint_folder
from rosellm.roseinfer import sampling

EXACT: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
PROMPTS = ["import os\n", "def main(", "class Request:\n    def __init__(self, "]
WINDOW = 96  # tokens
GREEDY = {"do_sample": False}  # as tasks of the harness say it
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}"
)


def client(package: str) -> pytest.MarkDecorator:
    """Skip a test without its client's package on a machine with a GPU; elsewhere it fails."""
    lacks = torch.cuda.is_available() and find_spec(package) is None
    return pytest.mark.skipif(lacks, reason=f"{package} is not installed on this GPU machine")


def module(name: str, **names: Any) -> ModuleType:
    one = ModuleType(name)
    one.__dict__.update(names)
    return one


def get_tokenizer(name: str, *, revision: str | None = None, **_options: Any) -> Any:
    return AutoTokenizer.from_pretrained(name, revision=revision)


@pytest.fixture(scope="module", autouse=True)
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """``rosellm`` as vLLM and nano-vllm, with a version and the modules of vLLM that the clients import."""
    packages = tmp_path_factory.mktemp("packages")
    information = packages / "vllm-0.12.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.12.0\n")
    modules: dict[str, Any] = {
        "vllm": rosellm,
        "nanovllm": rosellm,
        "vllm.sampling_params": sampling,
        "vllm.lora.request": module("vllm.lora.request", LoRARequest=None),
        "vllm.tokenizers": module("vllm.tokenizers", get_tokenizer=get_tokenizer),
        "vllm.renderers.hf": module(
            "vllm.renderers.hf", resolve_chat_template=lambda tokenizer, **_: tokenizer.chat_template
        ),
    }
    if find_spec("accelerate") is None:  # the harness imports it, but uses it on several devices only
        modules |= {"accelerate": MagicMock(), "accelerate.utils": MagicMock()}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        for name, one in modules.items():
            patch.setitem(sys.modules, name, one)
        yield


@pytest.fixture(scope="module")
def llm() -> rosellm.LLM:
    return rosellm.LLM(SHIPPED, **EXACT)


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    """A folder with the shipped model and a chat template."""
    folder = shutil.copytree(checkpoint_folder(SHIPPED), tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def texts(outputs: list[rosellm.RequestOutput]) -> list[str | None]:
    return [output.text for output in outputs]


# lm-evaluation-harness


@pytest.fixture(scope="module", params=SHIPPED_MODELS)
def harness(request: pytest.FixtureRequest, vllm: None) -> tuple[Any, Any]:
    """The harness's model on the engine, and the one on transformers."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.vllm_causallms import VLLM

    folder = str(checkpoint_folder(request.param))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = VLLM(folder, max_model_len=WINDOW + 2, **EXACT)  # whose windows are two tokens smaller
    return ours, HFLM(reference, tokenizer=tokenizer, max_length=WINDOW, batch_size=1)


def instances(kind: Any, arguments: list[tuple]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


@client("lm_eval")
def test_the_harness_generates_the_text_of_transformers(harness):
    ours, theirs = harness
    wish = GREEDY | {"until": ["\n\n", "):"], "max_gen_toks": 24}
    requests = instances("generate_until", [(prompt, wish) for prompt in PROMPTS])
    generated = ours.generate_until(requests)
    assert generated == theirs.generate_until(requests) and all(generated)


@client("lm_eval")
def test_the_harness_measures_the_likelihoods_of_transformers(harness):
    ours, theirs = harness
    (likely,) = ours.generate_until(instances("generate_until", [(PROMPTS[1], GREEDY | {"max_gen_toks": 3})]))
    pairs = [(PROMPTS[1], likely), (PROMPTS[1], "self):\n        return"), ("", PROMPTS[2])]
    requests = instances("loglikelihood", pairs)
    measured, expected = ours.loglikelihood(requests), theirs.loglikelihood(requests)
    assert [one[0] for one in measured] == pytest.approx([one[0] for one in expected], abs=1e-4)
    assert [one[1] for one in measured] == [one[1] for one in expected] == [True, False, False]


@client("lm_eval")
def test_the_harness_measures_texts_longer_than_the_model_in_the_windows_of_transformers(harness):
    ours, theirs = harness
    text = "".join(PROMPTS) * 16
    assert len(theirs.tok_encode(text)) > 2 * WINDOW
    requests = instances("loglikelihood_rolling", [(text,)])
    expected = pytest.approx(theirs.loglikelihood_rolling(requests), rel=1e-6)
    assert ours.loglikelihood_rolling(requests) == expected


# outlines


@client("outlines")
def test_outlines_generates_the_engines_text_alone_in_a_batch_and_in_several_versions(llm):
    import outlines

    greedy = rosellm.SamplingParams(temperature=0, max_tokens=12)
    several = rosellm.SamplingParams(n=3, seed=1, max_tokens=6)
    model, more = outlines.from_vllm_offline(llm), {"use_tqdm": False}
    expected = texts(llm.generate(PROMPTS, greedy, use_tqdm=False))
    assert [model(prompt, sampling_params=greedy, **more) for prompt in PROMPTS] == expected
    assert model.batch(PROMPTS, sampling_params=greedy, **more) == [[text] for text in expected]
    (output,) = llm.generate(PROMPTS[0], several, use_tqdm=False)
    assert model(PROMPTS[0], sampling_params=several, **more) == texts(output.outputs)


@client("outlines")
def test_outlines_chats_by_the_template_of_the_checkpoint(chatty):
    import outlines

    llm = rosellm.LLM(str(chatty), **EXACT)
    params = rosellm.SamplingParams(temperature=0, max_tokens=8)
    talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    model = outlines.from_vllm_offline(llm)
    answers = texts(llm.chat(talks, params, use_tqdm=False))
    assert answers != texts(llm.generate(PROMPTS, params, use_tqdm=False))
    assert model.batch(PROMPTS, sampling_params=params, use_tqdm=False) == [[text] for text in answers]
    assert model(outlines.inputs.Chat(talks[0]), sampling_params=params, use_tqdm=False) == answers[0]


@client("outlines")
@pytest.mark.parametrize("constraint", ["regex", "json", "choice"])
def test_a_constraint_of_outlines_is_refused_in_one_line(llm, constraint):
    import outlines

    schema = '{"type": "object", "properties": {"name": {"type": "string"}}}'
    kinds = {
        "regex": outlines.types.Regex(r"\d+"),
        "json": outlines.types.JsonSchema(schema),
        "choice": outlines.types.Choice(["a", "b"]),
    }
    with pytest.raises(SamplingError, match="structured outputs .* are not supported") as refused:
        outlines.from_vllm_offline(llm)(PROMPTS[0], kinds[constraint])
    assert "\n" not in str(refused.value)


# LangChain


@client("langchain_community")
@pytest.mark.filterwarnings("ignore:.langchain-community. is being sunset")
def test_langchain_generates_the_engines_text_up_to_a_stop_string(llm):
    from langchain_community.llms import VLLM

    model = VLLM(model=SHIPPED, temperature=0, max_new_tokens=20, dtype="float32")
    params = rosellm.SamplingParams(temperature=0, max_tokens=20, stop=["\n"])
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert {output.stop_reason for output in outputs} >= {"\n"}
    assert model.invoke(PROMPTS[0], stop=["\n"]) == outputs[0].text
    generations = model.generate(PROMPTS, stop=["\n"]).generations
    assert [one.text for (one,) in generations] == texts(outputs)


# nano-vllm


def test_the_example_of_nano_vllm_prints_prompts_and_texts(chatty, capsys):
    from nanovllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(chatty)
    llm = LLM(str(chatty), enforce_eager=True, tensor_parallel_size=1)
    talks = [[{"role": "user", "content": text}] for text in ("introduce yourself", "list all primes")]
    prompts = [
        tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in talks
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=256))
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"Prompt: {prompt!r}\nCompletion: {output['text']!r}")
    printed = capsys.readouterr().out.splitlines()
    assert printed[::2] == [f"Prompt: {prompt!r}" for prompt in prompts]
    assert [len(line) > len("Completion: ''") for line in printed[1::2]] == [True, True]


def test_the_benchmark_of_nano_vllm_counts_all_tokens(llm):
    from nanovllm import SamplingParams

    draw = random.Random(0)
    prompts = [[draw.randrange(4096) for _ in range(draw.randint(10, 100))] for _ in range(12)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=draw.randint(10, 40)) for _ in prompts
    ]
    llm.generate(["Benchmark: "], SamplingParams())
    began = perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = perf_counter() - began
    n_tokens = sum(own.max_tokens for own in params)
    assert sum(len(output["token_ids"]) for output in outputs) == n_tokens and n_tokens / seconds > 0


def test_names_of_vllm_are_those_of_the_engine(llm):
    from vllm import CompletionOutput, RequestOutput, TextPrompt, TokensPrompt

    ids = llm.get_tokenizer()(PROMPTS[0]).input_ids
    greedy = rosellm.SamplingParams(temperature=0, max_tokens=4)
    prompts = [TextPrompt(prompt=PROMPTS[0]), TokensPrompt(prompt_token_ids=ids)]
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    assert outputs[0].token_ids == outputs[1].token_ids
    assert isinstance(outputs[0], RequestOutput) and isinstance(outputs[0].outputs[0], CompletionOutput)
