"""The HTTP server, as OpenAI's client and other clients use it."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http.client import HTTPConnection
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rosellm import LLM, SamplingParams
from rosellm.models.checkpoint import SHIPPED, checkpoint_folder
from rosellm.serve import Server, build_app, main
from tests.test_clients import client, instances

GREEDY = {"temperature": 0, "max_tokens": 8}
PROMPT = "import os\n"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mark }}>>"


def options(**changed: object) -> Namespace:
    given = {"model": "rose-tiny", "served_model_name": None, "api_key": None, "max_in_flight": 300}
    return Namespace(**given | changed)


class Running:
    """A server in a thread of this process, on a free port."""

    def __init__(self, llm: LLM, **changed: object) -> None:
        self.state = Server(llm, options(**changed))
        config = uvicorn.Config(build_app(self.state), host="127.0.0.1", port=0, log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

        self._connections = httpx.Client(limits=httpx.Limits(max_connections=300), timeout=60)
        self._clients: dict[str, openai.OpenAI] = {}

    def client(self, key: str = "none") -> openai.OpenAI:
        if key not in self._clients:
            given = {"api_key": key, "max_retries": 0, "http_client": self._connections}
            self._clients[key] = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **given)
        return self._clients[key]

    def ask(self, method: str, path: str, body: str | bytes = b"") -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self.state.manager.close()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM("rose-tiny", device="cpu", max_batch_size=64, prefix_cache=True)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    params = SamplingParams(**GREEDY, prompt_logprobs=2)
    expected = llm.generate(PROMPT, params, use_tqdm=False)[0]  # before the manager has it
    running = Running(llm)
    running.expected = expected
    yield running
    running.close()


def test_a_completion_has_the_text_and_the_usage_of_the_engine(server):
    answer = server.client().completions.create(model="rose-tiny", prompt=PROMPT, **GREEDY)
    assert answer.choices[0].text == server.expected.text
    assert answer.choices[0].finish_reason == server.expected.finish_reason == "length"
    n = len(server.expected.prompt_token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (n, 8)


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_completion_gives_the_same_text_in_pieces_and_the_usage_last(server, n):
    ways = {"model": "rose-tiny", "prompt": PROMPT, "seed": 5, "max_tokens": 8, "n": n}
    whole = server.client().completions.create(**ways)
    usage = {"include_usage": True}
    chunks = list(server.client().completions.create(**ways, stream=True, stream_options=usage))
    pieces = [[c.choices[0].text for c in chunks if c.choices and c.choices[0].index == i] for i in range(n)]
    assert ["".join(own) for own in pieces] == [choice.text for choice in whole.choices]
    assert len(pieces[0]) > 4 and chunks[-1].usage.completion_tokens == 8 * n
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert ends == ["length"] * n


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_are_those_of_the_engine(server, llm, streamed):
    given = {"model": "rose-tiny", "prompt": PROMPT, "logprobs": 2, "stream": streamed, **GREEDY}
    answer = server.client().completions.create(**given)
    chunks = (
        [c.choices[0].logprobs for c in answer if c.choices] if streamed else [answer.choices[0].logprobs]
    )
    found = [p for chunk in chunks if chunk for p in chunk.token_logprobs]
    assert len(found) == 8 and all(p <= 0 for p in found)
    assert all(len(top) in (2, 3) for chunk in chunks if chunk for top in chunk.top_logprobs)


@pytest.mark.parametrize("form", ["text", "token ids"])
def test_an_echo_begins_with_the_prompt_and_its_logprobs_the_first_of_which_is_null(server, form):
    ids, count = server.expected.prompt_token_ids, len(server.expected.prompt_token_ids) + 8
    prompt = PROMPT if form == "text" else ids
    given = {"model": "rose-tiny", "prompt": prompt, "logprobs": 2, "echo": True, **GREEDY}
    (choice,) = server.client().completions.create(**given).choices
    found, known = choice.logprobs, [one and list(one.values()) for one in server.expected.prompt_logprobs]
    assert choice.text == "".join(found.tokens) == PROMPT + server.expected.text
    assert len(found.token_logprobs) == len(found.top_logprobs) == count
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    expected = [one[0].logprob for one in known[1:]]
    assert found.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    assert found.top_logprobs[1].keys() == {one.decoded_token for one in known[1]}


def test_logprobs_of_the_prompt_have_the_form_of_vllm(server):
    given = {"model": "rose-tiny", "prompt": PROMPT, "extra_body": {"prompt_logprobs": 2}, **GREEDY}
    (choice,) = server.client().completions.create(**given).choices
    first, *rest = server.expected.prompt_logprobs
    expected = [{str(token): asdict(one) for token, one in entry.items()} for entry in rest]
    assert choice.prompt_logprobs[0] is first is None and choice.logprobs is None
    for found, entry in zip(choice.prompt_logprobs[1:], expected, strict=True):
        assert found == {token: pytest.approx(one, abs=1e-4) for token, one in entry.items()}


@client("lm_eval")
def test_the_harness_measures_the_likelihoods_of_transformers(server):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    folder = checkpoint_folder(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    likely = server.client().completions.create(
        model="rose-tiny", prompt="def main(", temperature=0, max_tokens=3
    )
    pairs = [("def main(", text) for text in (likely.choices[0].text, "self):\n    return", ")")]
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    harness = LocalCompletionsAPI(url, "huggingface", model="rose-tiny", tokenizer=str(folder), batch_size=2)
    measured = harness.loglikelihood(instances("loglikelihood", pairs))
    assert [is_greedy for _, is_greedy in measured][:2] == [True, False]
    for (context, continuation), (likelihood, is_greedy) in zip(pairs, measured, strict=True):
        n = len(tokenizer(context).input_ids)
        ids = tokenizer(context + continuation, return_tensors="pt").input_ids
        logprobs, new = model(ids).logits[0, n - 1 : -1].log_softmax(-1), ids[0, n:]
        assert likelihood == pytest.approx(logprobs.gather(1, new[:, None]).sum().item(), abs=1e-4)
        assert is_greedy == bool((logprobs.argmax(-1) == new).all())


def test_stop_strings_several_prompts_and_token_ids_are_served(server, llm):
    ids = server.expected.prompt_token_ids
    prompts = [ids, ids, [9]]
    answer = server.client().completions.create(model="rose-tiny", prompt=prompts, stop=["\n"], **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[0].text == answer.choices[1].text == server.expected.text.split("\n")[0]
    assert answer.choices[0].finish_reason == "stop"


def test_options_of_vllm_may_be_sent_as_well(server):
    extra = {
        "min_tokens": 3,
        "stop_token_ids": [1],
        "top_k": 1,
        "ignore_eos": True,
        "repetition_penalty": 1.1,
    }
    answer = server.client().completions.create(
        model="rose-tiny", prompt=PROMPT, max_tokens=4, extra_body=extra
    )
    assert answer.usage.completion_tokens >= 3


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("completions", "{", "no valid JSON"),
        ("completions", "\xff\xfe", "no valid JSON"),
        ("completions", "[1]", "no JSON object"),
        ("completions", "{}", "prompt is missing"),
        ("completions", '{"prompt": []}', "prompt is"),
        ("completions", '{"prompt": [[1], null]}', "the prompt is None"),
        ("completions", '{"prompt": "a", "temperature": "hot"}', "temperature is 'hot'"),
        ("completions", '{"prompt": "a", "max_tokens": -3}', "max_tokens is -3"),
        ("completions", '{"prompt": "a", "n": 0.5}', "n is 0.5"),
        ("completions", '{"prompt": "a", "structured_outputs": {"regex": "a"}}', "are not supported"),
        ("completions", '{"prompt": "a", "response_format": {"type": "json_object"}}', "are not supported"),
        ("completions", '{"prompt": "a", "stream": "false"}', "stream is 'false'"),
        ("completions", '{"prompt": "a", "stream": true, "stream_options": "x"}', "stream_options is 'x'"),
        ("completions", '{"prompt": "a", "model": [1]}', "model is [1]"),
        ("completions", '{"prompt": "a", "suffix": "b"}', "suffix is 'b'"),
        ("completions", '{"prompt": "a", "n": 301}', "301 completions are requested, and at most 300"),
        ("completions", '{"prompt": "a", "truncate_prompt_tokens": 0}', "truncate_prompt_tokens is 0"),
        ("completions", '{"prompt": [999999]}', "not in the vocabulary"),
        ("completions", '{"prompt": "a", "echo": true, "stream": true}', "not streamed"),
        ("completions", '{"prompt": "a", "prompt_logprobs": 0, "stream": true}', "not streamed"),
        ("completions", "[" * 100_000, "no valid JSON"),
        ("chat/completions", '{"messages": [], "chat_template_kwargs": 3}', "chat_template_kwargs is 3"),
        ("chat/completions", '{"messages": [], "tool_choice": "required"}', "tool_choice is 'required'"),
        ("chat/completions", '{"messages": [], "chat_template_kwargs": {"tokenize": 1}}', "no variable"),
        ("chat/completions", '{"messages": "hello"}', "messages are 'hello'"),
        ("chat/completions", '{"messages": [], "top_logprobs": 2}', "top_logprobs is given without"),
        ("chat/completions", '{"messages": [{"role": "user"}]}', "message 0"),
        ("chat/completions", '{"messages": [{"role": "user", "content": "x"}]}', "no chat template"),
    ],
)
def test_a_malformed_request_is_400_in_one_line(server, path, body, words):
    status, text = server.ask("POST", f"/v1/{path}", body.encode("latin-1"))
    message = json.loads(text)["error"]["message"]
    assert status == 400 and words in message and "\n" not in message


def test_another_models_name_is_404_and_none_is_the_served_models(server):
    with pytest.raises(openai.NotFoundError, match="model 'gpt-4' is not served; 'rose-tiny' is"):
        server.client().completions.create(model="gpt-4", prompt=PROMPT)
    assert server.ask("POST", "/v1/completions", json.dumps({"prompt": PROMPT}))[0] == 200


def test_a_prompt_without_room_is_400_and_many_tokens_are_as_many_as_fit(server, llm):
    status, text = server.ask("POST", "/v1/completions", json.dumps({"prompt": [5] * 600}))
    assert status == 400 and "leave no room" in text
    answer = server.client().completions.create(
        model="rose-tiny", prompt=[5] * 500, max_tokens=10_000, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == 512


def test_models_health_and_metrics_are_told(server):
    (one,) = server.client().models.list().data
    assert one.id == "rose-tiny" and server.ask("GET", "/health")[0] == 200
    _, text = server.ask("GET", "/metrics")
    assert re.search(r'^rosellm_tokens_total\{kind="completion"\} \d', text, re.MULTILINE)
    assert 'rosellm_requests_total{status="200"}' in text and "rosellm_time_to_first_token" in text


def free(running: Running) -> bool:
    until = time.monotonic() + 20
    while running.state.manager.n_in_flight and time.monotonic() < until:
        time.sleep(0.02)
    return running.state.manager.n_in_flight == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_hangs_up_cancels_its_request_and_logs_no_error(server, streamed, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": streamed, "n": 4, "seed": 1}
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        text = json.dumps(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
        connection.sendall((head + text).encode())
        while server.state.manager.n_in_flight < 4:
            time.sleep(0.005)
        streams = list(server.state.manager._in_flight)
    assert free(server)
    assert [stream.outcome.finish_reason for stream in streams] == ["cancelled"] * 4
    assert server.ask("GET", "/health")[0] == 200 and not caplog.records


def test_two_hundred_streams_with_slow_readers_all_end_with_the_text_of_one(server):
    def read(index: int) -> str:
        given = {"model": "rose-tiny", "prompt": PROMPT, "stream": True, **GREEDY}
        text = ""
        for chunk in server.client().completions.create(**given):
            text += chunk.choices[0].text
            if index % 20 == 0:
                time.sleep(0.05)
        return text

    with ThreadPoolExecutor(200) as pool:
        assert set(pool.map(read, range(200))) == {server.expected.text}
    assert free(server)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a key, a chat template and room for two requests."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shipped = LLM("rose-tiny", device="cpu", max_batch_size=2)._folder
    folder.mkdir()
    for path in shipped.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    running = Running(LLM(str(folder), device="cpu", max_batch_size=2), api_key="secret", max_in_flight=2)
    yield running
    running.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_chat_is_answered_by_the_rendered_template(guarded, streamed):
    talk = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    extra = {"chat_template_kwargs": {"mark": "!"}}
    given = {
        "messages": talk,
        "model": "rose-tiny",
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": extra,
        **GREEDY,
    }
    answer = guarded.client("secret").chat.completions.create(**given, stream=streamed)
    by_text = guarded.client("secret").completions.create(model="rose-tiny", prompt="<user>hi!>>", **GREEDY)
    if streamed:
        deltas = [chunk.choices[0].delta for chunk in answer]
        text = "".join(delta.content or "" for delta in deltas)
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    else:
        text = answer.choices[0].message.content
        assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert text == by_text.choices[0].text


def test_a_token_that_is_part_of_a_character_has_the_bytes_of_that_part(guarded):
    first, _ = guarded.state.llm.get_tokenizer().encode("é")
    given = {
        "model": "rose-tiny",
        "messages": [{"role": "user", "content": "x"}],
        "logit_bias": {str(first): 100},
    }
    answer = guarded.client("secret").chat.completions.create(**given, **GREEDY, logprobs=True)
    assert {bytes(one.bytes) for one in answer.choices[0].logprobs.content} == {"é".encode()[:1]}


def test_a_wrong_key_is_401_and_health_needs_none(guarded):
    with pytest.raises(openai.AuthenticationError):
        guarded.client("guessed").models.list()
    assert guarded.ask("GET", "/v1/models")[0] == 401 and guarded.ask("GET", "/health")[0] == 200


def test_too_many_requests_are_429_and_the_accepted_ones_are_served(guarded):
    long = {"model": "rose-tiny", "prompt": "x", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    client = guarded.client("secret")
    streams = [client.completions.create(**long, stream=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError):
        client.completions.create(**long)
    assert all(sum(1 for _ in stream) > 10 for stream in streams)


def test_a_host_that_others_reach_needs_a_key(capsys):
    assert main(["--host", "0.0.0.0"]) == 2
    assert "set --api-key" in capsys.readouterr().err


def test_sigterm_lets_open_requests_end(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rosellm.serve", "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            client.models.list()
            break
        except openai.APIConnectionError:
            time.sleep(0.1)
    long = {"model": "rose-tiny", "prompt": "x", "max_tokens": 100, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(**long, stream=True)
    next(iter(stream))
    process.send_signal(signal.SIGTERM)
    ends = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    assert ends[-1] == "length" and process.wait(30) == 0
