"""What programs written for vLLM expect of ``LLM``: names, defaults, outputs, requests that fail alone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rosellm import LLM, SamplingParams
from rosellm.errors import (
    BusyError,
    CheckpointError,
    LongPromptError,
    OptionError,
    PromptError,
    SamplingError,
)
from rosellm.models.tokenizer import load_tokenizer
from rosellm.models.weights import save_model
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.roseinfer.vllm_options import NEUTRAL, SAME_AS
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import MODERN, random_model, small_config
from tests.roseinfer.serving.common import WORDS

GREEDY = SamplingParams(temperature=0, max_tokens=5)
N_POSITIONS = 64
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{% if shout is defined %}{{ shout }}{% endif %}"
    "{% if add_generation_prompt %}>>{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer([WORDS], 290)
    tokenizer.save(folder)
    config = small_config(
        **MODERN, vocab_size=tokenizer.vocab_size, n_positions=N_POSITIONS, eos_token_ids=(0,)
    )
    save_model(random_model(3, config), folder, torch.float32)
    return folder


def made(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "max_batch_size": 4, "block_size": 8} | options)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return made(checkpoint)


def run(llm: LLM, prompts, params=GREEDY, **more):
    return llm.generate(prompts, params, use_tqdm=False, **more)


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "copied")


# Nothing is lost to one request.


@pytest.mark.parametrize("most", [None, 1000, N_POSITIONS - 3])
def test_a_request_ends_with_length_where_the_room_ends(llm, most):
    (output,) = run(llm, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (N_POSITIONS - 3, "length")


def test_a_small_cache_ends_a_request_too(checkpoint):
    small = made(checkpoint, num_kv_blocks=3)
    (output,) = run(small, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (3 * 8 + 1 - 3, "length")


def test_a_prompt_without_room_fails_alone(llm):
    prompts = ["hello", [5] * N_POSITIONS, "world"]
    with pytest.warns(UserWarning, match="prompt 1 is not completed: 64 prompt tokens leave no room"):
        outputs = run(llm, prompts)
    assert [o.finish_reason == "failed" for o in outputs] == [False, True, False]
    assert "leave no room" in outputs[1].error and outputs[1].text == ""
    assert [o.token_ids for o in outputs[::2]] == [o.token_ids for o in run(llm, prompts[::2])]
    with pytest.warns(UserWarning, match="prompt 1"):
        assert [len(o.outputs) for o in run(llm, prompts, SamplingParams(n=3, seed=0))] == [3, 3, 3]
    with pytest.raises(LongPromptError, match="the model has 64 positions"):
        run(llm, [[5] * N_POSITIONS])


def test_a_default_context_that_memory_does_not_hold_is_shortened_with_one_warning(checkpoint, monkeypatch):
    monkeypatch.setattr("rosellm.roseinfer.trial.CPU_KV_BYTES", 9000)
    with pytest.warns(UserWarning, match="max_model_len is 16: .* the model's 64"):
        short = made(checkpoint)
    assert short.llm_engine.model_config.max_model_len == 16
    assert len(run(short, [[5] * 15])[0].token_ids) == 1
    with pytest.raises(OptionError, match="use at most 16"):
        made(checkpoint, max_model_len=40)


@pytest.mark.parametrize(("most", "kept"), [(2, [8, 9]), (-1, [7] * 56 + [8] + [9] * 6)])
def test_a_prompt_is_truncated_to_its_last_tokens_if_asked(llm, most, kept):
    prompt = [8, 9] if most == 2 else [7] * 80 + [8] + [9] * 6
    params = SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=most)
    assert run(llm, [[1, 2, *prompt]], params)[0].prompt_token_ids == kept


# Names.


@pytest.mark.parametrize("name", SAME_AS)
def test_a_name_of_vllm_is_taken_for_ours(checkpoint, name):
    value = True if name == "enable_prefix_caching" else 3
    engine = made(checkpoint, **{name: value}).engine
    known = {"max_batch_size": engine.max_batch_size, "num_kv_blocks": engine.num_kv_blocks}
    assert known.get(SAME_AS[name], engine.prefix_cache is not None) == value


def test_options_without_effect_are_accepted_at_their_neutral_value(checkpoint):
    neutral = {name: values[0] if values else 1 for name, (values, _) in NEUTRAL.items()}
    ours = {"seed": 0, "revision": None, "tokenizer": None, "enforce_eager": True, "dtype": "float"}
    unset = dict.fromkeys(SAME_AS)
    assert run(made(checkpoint, **neutral, **ours, **unset), "hello")[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trust_remote_code": True}, "trust_remote_code is True: code from checkpoints is never run"),
        ({"quantization": "awq"}, "quantization 'awq' is unknown; use 'fp8', 'int8', 'int4'"),
        ({"max_num_sequences": 4}, "did you mean max_num_seqs"),
        ({"temperature": 0.5}, "LLM has no option 'temperature'"),
        ({"generation_config": "else"}, "generation_config is 'else'"),
    ],
)
def test_an_option_that_is_not_supported_is_refused_in_one_line(checkpoint, options, words):
    with pytest.raises(OptionError, match=words):
        made(checkpoint, **options)


def test_arguments_and_parameters_without_effect_are_accepted_and_others_refused_in_one_line(llm):
    params = SamplingParams(max_tokens=1, best_of=1, output_kind=None, extra_args={})
    ways = {"lora_request": None, "priority": [0], "tokenization_kwargs": {}}
    assert llm.generate("hello", params, use_tqdm=False, **ways)[0].finish_reason == "length"
    others = {"lora_request": object(), "priority": [0, 1], "tokenization_kwargs": {"truncation": False}}
    for name, value in others.items():
        with pytest.raises(OptionError, match=f"^{name} is .*: "):
            llm.generate("hello", params, use_tqdm=False, **{name: value})
    for name, value in {"best_of": 2, "output_kind": 1, "extra_args": {"a": 1}}.items():
        with pytest.raises(SamplingError, match=f"^{name} is .*must be None"):
            SamplingParams(**{name: value})


def test_a_line_break_may_be_a_bad_word(llm):
    sequence = llm.engine.make_sequence([1], SamplingParams(bad_words=["\n"]))
    assert sequence.bad_words == [llm.engine.tokenizer.encode("\n", special=False)]


@pytest.mark.parametrize("dtype", ["half", torch.bfloat16, torch.float32])
def test_dtypes_may_be_those_of_torch_or_half(checkpoint, dtype):
    assert made(checkpoint, dtype=dtype).engine.model.dtype == (torch.float16 if dtype == "half" else dtype)


@pytest.mark.parametrize("names", [("prompt",), ("prompt_token_ids",), ("prompt", "prompt_token_ids")])
def test_prompts_may_be_dictionaries_and_the_outputs_show_their_texts(llm, names):
    ids = llm.engine.tokenizer.encode("hello")
    form = {name: {"prompt": "hello", "prompt_token_ids": ids}[name] for name in names}
    for given in (form, [form]):
        (output,) = run(llm, given)
        assert output.token_ids == run(llm, [ids])[0].token_ids
        assert output.prompt == form.get("prompt")
    for other in ({"text": "hello"}, {"prompt": "hello", "multi_modal_data": {"image": 1}}):
        with pytest.raises(PromptError, match="only prompt and prompt_token_ids are supported"):
            run(llm, [other])
    with pytest.raises(OptionError, match="LoRA"):
        run(llm, "hello", lora_request=1)


def test_parameters_can_be_changed_copied_and_made_from_optional_values_and_numbers_of_numpy(llm):
    params = SamplingParams.from_optional(
        temperature=np.float32(0.5), top_k=None, max_tokens=np.int64(3), seed=-1
    )
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.5, 0, 3, None)
    other = params.clone()
    other.seed = 100
    assert params.seed is None and len(run(llm, "hello", other)[0].token_ids) <= 3
    with pytest.raises(SamplingError, match="temperature is -1"):
        other.temperature = -1
    with pytest.raises(SamplingError, match="no 'temprature'"):
        other.temprature = 1
    with pytest.raises(SamplingError, match="min_tokens is 9, more than max_tokens, 3"):
        other.min_tokens = 9
        run(llm, "hello", other)


def test_a_subclass_of_the_parameters_may_have_more_fields(llm):
    @dataclasses.dataclass
    class Named(SamplingParams):
        name: str = ""

    own = Named(temperature=0.0, max_tokens=5, name="first")
    assert own.clone().name == "first" and run(llm, "hello", own) == run(llm, "hello")


def test_a_seed_of_the_llm_makes_calls_repeatable(checkpoint):
    first, second = (run(made(checkpoint, seed=4), ["hello"] * 3, SamplingParams()) for _ in range(2))
    assert first == second and len({tuple(o.token_ids) for o in first}) > 1


def test_the_tokenizer_may_come_from_elsewhere(checkpoint, tmp_path, llm):
    train_tokenizer([WORDS[::-1]], 280).save(tmp_path)
    other = made(checkpoint, tokenizer=str(tmp_path))
    assert run(other, "hello")[0].prompt_token_ids != run(llm, "hello")[0].prompt_token_ids
    assert other.get_tokenizer().decode(other.get_tokenizer()("hello").input_ids) == "hello"


# What the checkpoint says.


def test_the_tokenizers_own_end_of_sequence_ends_a_request_too(copied):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"eos_token_id": 250}))
    llm = made(copied)
    assert set(llm.engine.config.eos_token_ids) == {250, 0}
    (output,) = run(llm, "hello", SamplingParams(temperature=0, logit_bias={0: 100.0}))
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([0], "stop", None)


def test_sampling_defaults_are_those_of_the_generation_config(copied):
    own = {"temperature": 0.3, "top_k": 1, "top_p": 0.8, "max_new_tokens": 7, "repetition_penalty": 1.1}
    (copied / "generation_config.json").write_text(json.dumps(own))
    llm = made(copied)
    defaults = llm.get_default_sampling_params()
    assert (defaults.top_k, defaults.top_p, defaults.max_tokens, defaults.temperature) == (1, 0.8, 7, 0.3)
    assert len({tuple(o.token_ids) for o in run(llm, ["hello"] * 4, None)}) == 1  # by top_k
    assert made(copied, generation_config="vllm").get_default_sampling_params() == SamplingParams()


def test_a_template_that_changed_is_read_again_and_takes_variables_tools_and_parts(copied):
    llm = made(copied)
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    with pytest.raises(CheckpointError, match="no chat template"):
        llm.chat(talk, GREEDY, use_tqdm=False)
    (copied / "chat_template.jinja").write_text(TEMPLATE)

    def shown(messages=talk, **more):
        return llm.chat(messages, GREEDY, use_tqdm=False, **more)[0].prompt

    assert shown() == "<user>a\nb>>"
    assert shown(chat_template_kwargs={"shout": "!"}) == "<user>a\nb!>>"
    assert shown(tools=[{"type": "function", "function": {"name": "look"}}]) == "<user>a\nb[look]>>"
    assert shown(chat_template="{{ messages[0].content }}") == "a\nb"
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    assert shown([talk[0], called]) == "<user>a\nb<assistant>>>"
    started = [*talk, {"role": "assistant", "content": "so"}]
    assert shown(started, add_generation_prompt=False, continue_final_message=True).endswith("<assistant>so")
    (copied / "chat_template.jinja").write_text("other {{ messages[0].role }}")
    assert shown() == "other user"


def test_a_text_that_repeats_the_beginning_of_sequence_is_warned_of(copied, recwarn):
    config = json.loads((copied / "tokenizer.json").read_text())
    special = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    single = [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    config["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {"<|endoftext|>": special},
    }
    (copied / "tokenizer.json").write_text(json.dumps(config))
    llm = made(copied)
    run(llm, "hello")
    assert not recwarn.list
    with pytest.warns(UserWarning, match="prompt 1 begins with two beginning-of-sequence tokens"):
        run(llm, ["hello", "<|endoftext|>hello"])


def test_a_token_without_an_embedding_is_refused_only_where_a_prompt_has_it(copied):
    size = load_tokenizer(copied, small_config(vocab_size=290)).vocab_size
    (copied / "added_tokens.json").write_text(json.dumps({"<pad>": size}))
    llm = made(copied)
    assert run(llm, "hello")[0].token_ids
    with pytest.raises(PromptError, match="not in the vocabulary"):
        run(llm, "hello<pad>")


# Outputs.


@pytest.mark.parametrize("stop", [None, "never"])
@pytest.mark.parametrize("is_included", [False, True])
def test_a_text_with_or_without_its_stop_token_is_the_same_streamed_and_beside_a_stop_string(
    llm, stop, is_included
):
    asked = {"temperature": 0, "max_tokens": 8, "stop": stop, "include_stop_str_in_output": is_included}
    plain = run(llm, "hello", SamplingParams(temperature=0, max_tokens=8))[0]
    asked["stop_token_ids"] = [plain.token_ids[3]]
    (output,) = run(llm, "hello", SamplingParams(**asked))
    n = output.token_ids.index(plain.token_ids[3]) + is_included
    assert output.text == llm.served.tokenizer.decode(plain.token_ids[:n], output.prompt_token_ids)
    with StreamingManager(llm) as manager:
        streamed = manager.add_request("hello", SamplingParams(**asked))
        assert "".join(manager.stream_text(streamed)) == output.text


def test_min_tokens_ban_the_end_of_sequence_even_if_it_is_ignored(llm):
    params = {"temperature": 0, "max_tokens": 4, "min_tokens": 3, "logit_bias": {0: 100.0}}
    (output,) = run(llm, "hello", SamplingParams(**params, ignore_eos=True))
    assert [token == 0 for token in output.token_ids] == [False, False, False, True]


def test_an_output_shows_its_text_and_becomes_json(llm):
    params = SamplingParams(n=2, seed=1, max_tokens=4, logprobs=1, prompt_logprobs=0)
    (output,) = run(llm, "hello", params)
    as_json = json.loads(json.dumps(dataclasses.asdict(output)))
    assert as_json["text"] == output.text != ""
    assert as_json["others"][0]["text"] == output.outputs[1].text
    assert repr(output.text) in repr(output) and "token_times" not in repr(output)
    assert "hello" in output._repr_html_() and [o.index for o in output.outputs] == [0, 1]
    assert output.finished and output["text"] == output.text


def test_special_tokens_have_a_text_in_logprobs_and_on_request_in_the_output(llm):
    ends = {"logit_bias": {0: 100.0}, "temperature": 0, "max_tokens": 2, "logprobs": 0}
    (output,) = run(llm, "hello", SamplingParams(**ends))
    assert output.logprobs[0][0].decoded_token == "<|endoftext|>" and output.text == ""
    shown = SamplingParams(**ends, ignore_eos=True, skip_special_tokens=False)
    assert run(llm, "hello", shown)[0].text == "<|endoftext|>" * 2
    kept = SamplingParams(**ends, skip_special_tokens=False, include_stop_str_in_output=True)
    assert run(llm, "hello", kept)[0].text == "<|endoftext|>"


def test_a_stop_string_may_be_kept_and_is_the_reason(llm):
    text = run(llm, "hello", SamplingParams(temperature=0, max_tokens=20))[0].text
    stop = text[3:5]
    for kept in (False, True):
        params = SamplingParams(temperature=0, max_tokens=20, stop=[stop], include_stop_str_in_output=kept)
        (output,) = run(llm, "hello", params)
        assert output.text == text[: text.index(stop)] + stop * kept and output.stop_reason == stop


def test_bad_words_do_not_occur(llm):
    tokenizer = llm.engine.tokenizer
    word = next(w for w in WORDS.split() if len(tokenizer.encode(w, special=False)) == 1)
    (token,) = tokenizer.encode(word, special=False)
    wish = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logit_bias": {token: 100.0}}
    assert run(llm, "hello", SamplingParams(**wish))[0].token_ids == [token] * 3
    assert token not in run(llm, "hello", SamplingParams(**wish, bad_words=[word]))[0].token_ids


def test_bad_words_of_several_tokens_do_not_occur(llm):
    tokenizer = llm.engine.tokenizer
    (free,) = run(llm, "hello", SamplingParams(temperature=0, max_tokens=20))
    spans = [free.token_ids[i : i + n] for n in (2, 3) for i in range(20 - n)]
    words = [w for w in map(tokenizer.decode, spans) if tokenizer.encode(w.lstrip(), special=False) in spans]
    assert words and all(word in free.text for word in words)
    (output,) = run(llm, "hello", SamplingParams(temperature=0, max_tokens=20, bad_words=words))
    assert len(output.token_ids) == 20 and not any(word in output.text for word in words)


@pytest.mark.parametrize(
    ("word", "reason"), [("  ", "no tokens"), (WORDS * 99, "besides the last of each word; at most 1024")]
)
def test_bad_words_that_cannot_be_followed_are_refused(llm, word, reason):
    with pytest.raises(SamplingError, match=reason):
        run(llm, "hello", SamplingParams(bad_words=[word]))


def test_a_word_counts_after_a_space_too_if_it_then_has_as_many_tokens_and_another_first_one(llm):
    tokenizer, words = llm.engine.tokenizer, WORDS.split()
    expected = []
    for word in words:
        bare, spaced = (tokenizer.encode(text, special=False) for text in (word, " " + word))
        expected += [bare] + [spaced] * (len(spaced) == len(bare) and spaced[0] != bare[0])
    assert len(words) < len(expected) < 2 * len(words)
    params = SamplingParams(bad_words=[" " + word for word in words])
    assert llm.engine.make_sequence([1], params).bad_words == expected


def test_detokenize_may_be_off(llm):
    assert run(llm, "hello", SamplingParams(detokenize=False))[0].text is None


# Coroutines.


def test_coroutines_share_a_batch_and_a_cancelled_one_leaves_it(llm):
    alone = [o.text for o in run(llm, ["hello", "world"])]

    async def many():
        outputs = await asyncio.gather(*(llm.generate_async(p, GREEDY) for p in ("hello", "world")))
        several = await llm.generate_async("hello", SamplingParams(n=3, seed=2, max_tokens=3))
        endless = SamplingParams(max_tokens=None, ignore_eos=True)
        task = asyncio.create_task(llm.generate_async("hello", endless))
        await asyncio.sleep(0.01)
        with pytest.raises(BusyError):
            run(llm, "hello")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [o.text for o in outputs], several

    texts, several = asyncio.run(many())
    assert texts == alone and len(several.outputs) == 3
    assert several.outputs == run(llm, "hello", SamplingParams(n=3, seed=2, max_tokens=3))[0].outputs
