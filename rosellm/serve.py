"""An HTTP server with OpenAI's interface: ``python -m rosellm.serve MODEL``.

It serves ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``, ``/health`` and ``/metrics``, on
127.0.0.1 unless another host and an API key are given.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import signal
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import prometheus_client as prometheus
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from rosellm import errors
from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.errors import CheckpointError, OptionError, PromptError, RoseError, SamplingError
from rosellm.models.checkpoint import SHIPPED
from rosellm.models.quantized import CODES, KV_DTYPE, QUANTIZATION, WEIGHT_FORMS
from rosellm.roseinfer.llm import LLM
from rosellm.roseinfer.outputs import Logprob, RequestOutput, decoded_logprobs
from rosellm.roseinfer.recipe import PROPOSERS, SPECULATION
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.prompts import each_encoded
from rosellm.roseinfer.serving.stream import Reply, merged
from rosellm.roseinfer.serving.streaming import WHOLE, StreamingManager
from rosellm.roseinfer.vllm_options import check_fields

Json = dict[str, Any]
LIMITS = ("max_completion_tokens", "max_tokens")  # of a chat
ENDING = ("finish_reason", "stop_reason", "prompt_logprobs")  # what an output adds to its choice


class KeyRefused(RoseError):
    """A request without the server's API key."""


# The status of an answer by the error; of all others it is 503.
STATUS = {KeyRefused: 401, errors.UnknownModelError: 404, errors.OverloadError: 429}
STATUS |= dict.fromkeys((PromptError, SamplingError, CheckpointError), 400)
ANSWERS = prometheus.Counter("rosellm_requests", "Requests by status.", ["status"])
TOKENS = prometheus.Counter("rosellm_tokens", "Tokens of prompts and completions.", ["kind"])
TTFT = prometheus.Histogram("rosellm_time_to_first_token_seconds", "Time to the first token.")
LATENCY = prometheus.Histogram("rosellm_latency_seconds", "Time to the last token.")
RUNNING = prometheus.Gauge("rosellm_requests_running", "Requests that have not ended.")


class Call:
    """A request to the server, and the forms of its answer.

    body: the body of a completion, into which that of a chat is turned.
    prompts: texts or token ids. ids: all of them as token ids.
    each: the sampling parameters of the completions of every prompt.
    roles: by the index of a choice, the role that its first piece has.
    head: what all answers have in common, and all pieces of a streamed answer.
    """

    def __init__(self, llm: LLM, model: str, body: Any, is_chat: bool) -> None:
        if not isinstance(body, dict):
            raise PromptError("the body is no JSON object")
        check_fields(body, model)
        self.body = body | _of_chat(llm, body) if is_chat else body
        self.is_chat, self.is_streamed, self.echoes = is_chat, body.get("stream"), self.body.get("echo")
        self.tokenizer: Any = llm.served.tokenizer
        given = self.body.get("prompt")
        if not isinstance(given, (str, list)) or given == []:
            raise PromptError("prompt is missing or empty; give text, token ids, or a list of these")
        self.prompts: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        defaults = vars(llm.get_default_sampling_params()) | ({"max_tokens": None} if is_chat else {})
        asked = {"prompt_logprobs": self.body.get("logprobs")} if self.echoes else {}
        asked |= {name: self.body[name] for name in defaults if self.body.get(name) is not None}
        self.each = SamplingParams(**defaults | asked).each()
        self.ids = each_encoded(llm.served.encode_many, self.prompts)
        self.roles = dict.fromkeys(range(len(self.ids) * len(self.each)), {"role": "assistant"})
        kind = "chat.completion" + ".chunk" * bool(self.is_streamed) if is_chat else "text_completion"
        name = f"{'chat' * is_chat}cmpl-{uuid4().hex}"
        self.head = {"id": name, "object": kind, "created": int(time.time()), "model": model}

    def whole(self, outputs: list[RequestOutput]) -> Json:
        """Return an answer that is not streamed."""
        choices = [self.choice(i, o.text or "", o.token_ids, o.logprobs, o) for i, o in enumerate(outputs)]
        return self.answer(choices, self.usage(outputs))

    def choice(self, index: int, text: str, ids: list[int], entries: Any, output: Any = None) -> Json:
        """Return a choice or, if the answer is streamed, a piece of one.

        ids, entries: the tokens, and their logprobs if these are wanted.
        output: None while the request runs.
        """
        if self.echoes:  # the answer is whole
            prompt, given = output.prompt_token_ids, self.prompts[index // len(self.each)]
            is_whole = isinstance(given, str) and self.each[0].truncate_prompt_tokens is None
            text = (given if is_whole else self.tokenizer.decode(prompt, skip_special=False)) + text
            ids, entries = [*prompt, *ids], entries and output.prompt_logprobs + entries
        said = self.roles.pop(index, {}) | {"content": text}
        content = {"delta" if self.is_streamed else "message": said} if self.is_chat else {"text": text}
        logprobs = self._logprobs(ids, entries) if entries else None
        end = {name: getattr(output, name, None) for name in ENDING}
        return {"index": index, **content, "logprobs": logprobs, **end}

    def answer(self, choices: list[Json], usage: Json | None = None) -> Json:
        """Return an answer or a piece of one."""
        return self.head | {"choices": choices, "usage": usage}

    def usage(self, outputs: list[RequestOutput]) -> Json:
        """Return the number of tokens of a complete answer, and add it to the metrics."""
        firsts = outputs[:: len(self.each)]  # one for each prompt
        n_prompt, n_new = sum(len(o.prompt_token_ids) for o in firsts), sum(len(o.token_ids) for o in outputs)
        ANSWERS.labels(200).inc()
        TOKENS.labels("prompt").inc(n_prompt)
        TOKENS.labels("completion").inc(n_new)
        for output in outputs:
            TTFT.observe(output.metrics.ttft or 0.0)
            LATENCY.observe(output.metrics.latency or 0.0)
        tokens = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
        return tokens | {"prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in firsts)}}

    def _logprobs(self, ids: list[int], entries: list[Any]) -> Json:
        """Return the logprobs of tokens in OpenAI's form, of which chats and completions have one each.

        entries: as in an output; None for the first token of a prompt.
        """
        if self.is_chat:
            return {"content": [self._chances(entry) for entry in entries]}
        name = self.tokenizer.token_name
        return {
            "tokens": [*map(name, ids)],
            "token_logprobs": [e and e[token].logprob for token, e in zip(ids, entries, strict=True)],
            "top_logprobs": [e and {name(t): one.logprob for t, one in e.items()} for e in entries],
        }

    def _chances(self, entry: dict[int, Logprob]) -> Json:
        """Return the logprob of a token, and of the most likely ones, in the form of a chat."""
        ones: list[Json] = [
            {"token": e.decoded_token, "logprob": e.logprob, "bytes": list(self.tokenizer.text_bytes(token))}
            for token, e in entry.items()
        ]
        return ones[0] | {"top_logprobs": sorted(ones, key=lambda o: -o["logprob"])[: self.each[0].logprobs]}


def _of_chat(llm: LLM, body: Any) -> Json:
    """Return the fields that make the body of a chat that of a completion."""
    options = {"tools": body.get("tools") or None, "chat_template_kwargs": body.get("chat_template_kwargs")}
    _, prompts = llm.encode_chats([body.get("messages")], **options)
    n = next((body[name] for name in LIMITS if body.get(name) is not None), None)
    logprobs = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
    return {"prompt": prompts, "max_tokens": n, "logprobs": logprobs, "echo": False}


class Server:
    """The engine behind the routes; ``options`` are those of the command."""

    def __init__(self, llm: LLM, options: Namespace) -> None:
        self.llm, self.key, self.name = llm, options.api_key, options.served_model_name or options.model
        self.most = options.max_in_flight
        self.manager = StreamingManager(llm, SchedulerConfig(max_in_flight=self.most))
        RUNNING.set_function(lambda: self.manager.n_in_flight)

    async def check_key(self, request: Request) -> None:
        """Raise ``KeyRefused`` unless the request has the key; ``/health`` needs none."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self.key and request.url.path != "/health" and not hmac.compare_digest(given, self.key.encode()):
            raise KeyRefused("wrong or no API key")

    async def answer(self, request: Request) -> Any:
        """Answer a chat or a completion, whole or as a stream of events."""
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError, ClientDisconnect):
            raise PromptError("the body is no valid JSON") from None
        call = await asyncio.to_thread(Call, self.llm, self.name, body, "chat" in request.url.path)
        jobs = [(prompt, own, 1 if call.is_streamed else WHOLE) for prompt in call.ids for own in call.each]
        if len(jobs) > self.most:
            raise PromptError(f"{len(jobs)} completions are requested, and at most {self.most} can run")
        replies = [self.manager.stream(*job).start() for job in jobs]  # all of them, or an error
        if call.is_streamed:
            return StreamingResponse(_events(call, replies), media_type="text/event-stream")
        return call.whole(await _outputs(request, replies))


async def _outputs(request: Request, replies: list[Reply]) -> list[RequestOutput]:
    """Return the outputs of all replies; cancel them if one fails or the client hangs up."""
    outputs = asyncio.gather(*(reply.whole() for reply in replies))
    gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())  # the body was read before
    await asyncio.wait([outputs, gone], return_when=asyncio.FIRST_COMPLETED)
    for reply in replies:
        await reply.aclose()  # without effect on those that have ended
    if not outputs.done():
        raise HTTPException(499, "the client hung up")
    gone.cancel()
    return await outputs


async def _events(call: Call, replies: list[Reply]) -> AsyncIterator[str]:
    """Yield the pieces of all replies, in the order in which they arrive."""
    n_sent = [0] * len(replies)  # logprobs
    try:
        async for index, text in merged(replies):
            reply = replies[index]
            sequence = reply.stream.sequence
            known = len(sequence.metrics.token_times)  # a stop string may end the text before later tokens
            new = (sequence.logprobs or [])[n_sent[index] : known]  # may be ahead of the text
            n_sent[index] += len(new)
            ids, n = [int(own[0]) for own in new], sequence.params.logprobs or 0
            entries = decoded_logprobs(new, n, call.tokenizer)
            choice = call.choice(index, text or "", ids, entries, reply.output if text is None else None)
            yield f"data: {json.dumps(call.answer([choice]))}\n\n"
        usage = call.usage([reply.output for reply in replies])
        if (call.body.get("stream_options") or {}).get("include_usage"):
            yield f"data: {json.dumps(call.answer([], usage))}\n\n"
        yield "data: [DONE]\n\n"
    except RoseError as error:
        yield f"data: {bytes(_error(error).body).decode()}\n\n"


def _error(error: Any) -> JSONResponse:
    """Return the answer to a request that failed with a ``RoseError``, in OpenAI's form."""
    code = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 503)
    ANSWERS.labels(code).inc()
    return JSONResponse({"error": {"message": str(error), "type": type(error).__name__, "code": code}}, code)


def build_app(server: Server) -> FastAPI:
    """Return the application, which does not close the server's manager."""
    app = FastAPI(title="RoseLLM", dependencies=[Depends(server.check_key)])
    app.post("/v1/completions")(server.answer)
    app.post("/v1/chat/completions")(server.answer)
    app.add_exception_handler(RoseError, lambda _, error: _error(error))

    size = server.llm.model_config.max_model_len
    model = {"id": server.name, "object": "model", "owned_by": "rosellm", "max_model_len": size}
    app.get("/v1/models")(lambda: {"object": "list", "data": [model]})
    app.get("/health")(lambda: Response(status_code=200 if server.manager.is_open else 503))

    media = prometheus.CONTENT_TYPE_LATEST
    app.get("/metrics")(lambda: Response(prometheus.generate_latest(), media_type=media))
    return app


def run(argv: list[str] | None) -> None:
    parser = OneLineParser(prog="python -m rosellm.serve", description=__doc__)
    add = parser.add_argument
    add("model", nargs="?", default=SHIPPED, help="shipped model, folder or hub id")
    add("--host", default="127.0.0.1", help="another one requires an API key")
    add("--port", type=whole_number(0, 65535), default=8000)
    add("--api-key", default=os.environ.get("ROSELLM_API_KEY"), help="default: $ROSELLM_API_KEY, or none")
    add("--served-model-name", metavar="NAME", help="default: the model's name")
    add("--max-in-flight", type=whole_number(1), default=1024, help="requests beyond are answered with 429")
    for name in ("--dtype", "--device", "--load-format"):
        add(name, default="auto")
    add("--quantization", choices=WEIGHT_FORMS, help=QUANTIZATION)
    add("--kv-cache-dtype", choices=("auto", *CODES), default="auto", help=KV_DTYPE)
    add("--speculation", choices=PROPOSERS, help=SPECULATION)
    add("--draft-model", metavar="MODEL", help="for draft; default: the shipped model's own")
    sizes = {
        "max-model-len": None,
        "max-num-seqs": 256,
        "tensor-parallel-size": 1,
        "speculative-tokens": None,
    }
    for name, size in sizes.items():
        add(f"--{name}", type=whole_number(1), default=size)
    options = parser.parse_args(argv)
    if options.host not in ("127.0.0.1", "localhost", "::1") and not options.api_key:
        raise OptionError(f"host {options.host} can be reached from elsewhere; set --api-key")
    of_the_server = ("host", "port", "api_key", "served_model_name", "max_in_flight")  # the rest are LLM's
    own = {name: value for name, value in vars(options).items() if name not in of_the_server}
    server = Server(LLM(prefix_cache=True, **own), options)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn drains, then raises the signal again
    with server.manager:
        uvicorn.run(build_app(server), host=options.host, port=options.port, log_level="warning")


main = command(run)

if __name__ == "__main__":
    raise SystemExit(main())
