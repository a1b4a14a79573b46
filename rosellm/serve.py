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
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import prometheus_client as prometheus
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.errors import CheckpointError, OptionError, OverloadError, PromptError, RoseError, SamplingError
from rosellm.models.checkpoint import SHIPPED
from rosellm.roseinfer.llm import LLM
from rosellm.roseinfer.outputs import Logprob, RequestOutput, decoded_logprobs
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.stream import Reply
from rosellm.roseinfer.serving.streaming import WHOLE, StreamingManager

SAMPLING = set(SamplingParams.__dataclass_fields__) - {"max_tokens", "logprobs", "prompt_logprobs", "n"}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OF_THE_SERVER = ("host", "port", "api_key", "served_model_name", "max_in_flight")  # the rest are LLM's


class KeyRefused(RoseError):
    """A request without the server's API key."""


STATUS = {
    KeyRefused: 401,
    OverloadError: 429,
    PromptError: 400,
    SamplingError: 400,
    CheckpointError: 400,
}  # others: 503
ANSWERS = prometheus.Counter("rosellm_requests", "Requests by status.", ["status"])
TOKENS = prometheus.Counter("rosellm_tokens", "Tokens of prompts and completions.", ["kind"])
TTFT = prometheus.Histogram("rosellm_time_to_first_token_seconds", "Time to the first token.")
LATENCY = prometheus.Histogram("rosellm_latency_seconds", "Time to the last token.")
RUNNING = prometheus.Gauge("rosellm_requests_running", "Requests that have not ended.")


class Call:
    """A request to the server, and the forms of its answer.

    each: sampling parameters of the completions of every prompt.
    """

    def __init__(self, llm: LLM, body: Any, is_chat: bool) -> None:
        if not isinstance(body, dict):
            raise PromptError("the body is no JSON object")
        self.llm, self.body, self.is_chat = llm, body, is_chat
        self.prompts, self.each = [self._chat()] if is_chat else self._prompts(), self._params().each()
        self.head = {"id": f"cmpl-{uuid4().hex}", "created": int(time.time()), "model": body.get("model")}

    def _chat(self) -> list[int]:
        template = self.body.get("chat_template_kwargs") or {}
        tools = {"tools": self.body["tools"]} if self.body.get("tools") else {}
        messages: Any = self.body.get("messages")
        return self.llm.encode_chats([messages], **tools, **template)[1][0]

    def _prompts(self) -> list[str | list[int]]:
        given = self.body.get("prompt")
        is_one = isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int))
        prompts = [given] if is_one else given
        if not isinstance(prompts, list) or not prompts:
            raise PromptError("prompt is missing or empty; give text, token ids, or a list of these")
        return prompts

    def _params(self) -> SamplingParams:
        body, params = self.body, self.llm.get_default_sampling_params()
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        params.max_tokens = most if most is not None or self.is_chat else params.max_tokens
        for name in SAMPLING & {name for name, value in body.items() if value is not None}:
            setattr(params, name, body[name])
        asked, params.n = body.get("logprobs"), body.get("n") or 1
        params.logprobs = asked if not self.is_chat else (body.get("top_logprobs") or 0) if asked else None
        params.check()
        return params

    def chunk(self, index: int, text: str, reason: str | None, logprobs: Any = None) -> dict[str, Any]:
        """Return a piece of a streamed answer."""
        content = {"delta": {"content": text} if text else {}} if self.is_chat else {"text": text}
        return self.whole(
            [{"index": index, **content, "logprobs": logprobs, "finish_reason": reason}], ".chunk"
        )

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = []
        for index, output in enumerate(outputs):
            text = {"message": {"role": "assistant", "content": output.text}}
            content = {"index": index, **(text if self.is_chat else {"text": output.text})}
            chances = None if output.logprobs is None else self.logprobs(output.logprobs)
            end = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            choices.append({**content, "logprobs": chances, **end})
        return self.whole(choices) | {"usage": self.usage(outputs)}

    def whole(self, choices: list[dict[str, Any]], kind: str = "") -> dict[str, Any]:
        name = f"chat.completion{kind}" if self.is_chat else "text_completion"
        return self.head | {"object": name, "choices": choices}

    def usage(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Count the tokens of an answer, whose prompts have ``len(each)`` completions each."""
        firsts = outputs[:: len(self.each)]
        n_prompt, n_new = sum(len(o.prompt_token_ids) for o in firsts), sum(len(o.token_ids) for o in outputs)
        tokens = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
        return tokens | {"prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in firsts)}}

    def logprobs(self, entries: list[dict[int, Logprob]]) -> dict[str, Any]:
        """Return logprobs in OpenAI's form, of which chats and completions have one each."""
        own, n = [list(entry.values()) for entry in entries], self.each[0].logprobs or 0
        if self.is_chat:
            ranked = [(entry[0], sorted(entry, key=lambda one: one.rank)[:n]) for entry in own]
            return {"content": [_chance(o) | {"top_logprobs": list(map(_chance, top))} for o, top in ranked]}
        return {
            "tokens": [first.decoded_token for first, *_ in own],
            "token_logprobs": [first.logprob for first, *_ in own],
            "top_logprobs": [{one.decoded_token: one.logprob for one in entry} for entry in own],
        }


def _chance(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    return {"token": text, "logprob": one.logprob, "bytes": list(text.encode())}


class Server:
    """The engine behind the routes; ``options`` are those of the command."""

    def __init__(self, llm: LLM, options: Namespace) -> None:
        self.llm, self.name = llm, options.served_model_name or options.model
        self.key = options.api_key or os.environ.get("ROSELLM_API_KEY")
        self.manager = StreamingManager(llm, SchedulerConfig(max_in_flight=options.max_in_flight))
        RUNNING.set_function(lambda: self.manager.n_in_flight)

    async def check_key(self, request: Request) -> None:
        """Raise ``KeyRefused`` unless the request has the key; ``/health`` needs none."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self.key and request.url.path != "/health" and not hmac.compare_digest(given, self.key.encode()):
            raise KeyRefused("wrong or no API key")

    async def answer(self, request: Request) -> Response:
        """Answer a chat or a completion, whole or as a stream of events."""
        try:
            body = json.loads(await request.body())
        except ValueError:
            raise PromptError("the body is no valid JSON") from None
        call = await asyncio.to_thread(Call, self.llm, body, "chat" in request.url.path)
        interval = None if body.get("stream") else WHOLE
        jobs = [(prompt, own, interval) for prompt in call.prompts for own in call.each]
        replies = [self.manager.stream(*job).start() for job in jobs]  # all of them, or an error
        if body.get("stream"):
            return StreamingResponse(self._events(call, replies), media_type="text/event-stream")
        try:
            outputs = await unless_gone(request, asyncio.gather(*(reply.whole() for reply in replies)))
        finally:
            for reply in replies:
                await reply.aclose()
        _count(outputs)
        ANSWERS.labels(200).inc()
        return JSONResponse(call.answer(outputs))

    async def _events(self, call: Call, replies: list[Reply]) -> AsyncIterator[str]:
        """Yield the pieces of all replies as they arrive; a reader that goes away cancels them."""
        pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        readers = [asyncio.create_task(_read(call, *one, pieces)) for one in enumerate(replies)]
        try:
            for _ in readers:
                while (piece := await pieces.get()) is not None:
                    yield f"data: {json.dumps(piece)}\n\n"
            outputs = [o for reply in replies if isinstance(o := reply.stream.outcome, RequestOutput)]
            _count(outputs)
            if (call.body.get("stream_options") or {}).get("include_usage"):
                yield f"data: {json.dumps(call.whole([], '.chunk') | {'usage': call.usage(outputs)})}\n\n"
            ANSWERS.labels(200).inc()
            yield "data: [DONE]\n\n"
        finally:
            for reader in readers:
                reader.cancel()


async def _read(call: Call, index: int, reply: Reply, pieces: asyncio.Queue) -> None:
    """Put the chunks of one reply into ``pieces``, then None."""
    known = 0
    try:
        async for text in reply:
            fresh = (reply.stream.sequence.logprobs or [])[known:]  # may be ahead of the text
            known += len(fresh)
            entries = decoded_logprobs(fresh, call.llm.served.tokenizer)
            pieces.put_nowait(call.chunk(index, text, None, call.logprobs(entries) if fresh else None))
        pieces.put_nowait(call.chunk(index, "", reply.output.finish_reason))
    except RoseError as error:
        pieces.put_nowait(_error(error))
    finally:
        pieces.put_nowait(None)
        await reply.aclose()


def _count(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        TOKENS.labels("prompt").inc(len(output.prompt_token_ids))
        TOKENS.labels("completion").inc(len(output.token_ids))
        TTFT.observe(output.metrics.ttft or 0.0)
        LATENCY.observe(output.metrics.latency or 0.0)


async def unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Wait for ``work``; cancel it if the client hangs up."""
    task = asyncio.ensure_future(work)
    while not (await asyncio.wait({task}, timeout=0.2))[0]:
        if await request.is_disconnected():
            task.cancel()
    return await task


def _error(error: RoseError) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    code = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 503)
    return {"error": {"message": str(error), "type": type(error).__name__, "code": code}}


def build_app(server: Server) -> FastAPI:
    """Return the application; it closes the server's manager when it shuts down."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        server.manager.close()

    app = FastAPI(title="RoseLLM", lifespan=lifespan, dependencies=[Depends(server.check_key)])
    app.post("/v1/completions")(server.answer)
    app.post("/v1/chat/completions")(server.answer)

    @app.exception_handler(RoseError)
    async def refuse(_: Request, error: RoseError) -> Response:
        told = _error(error)
        ANSWERS.labels(told["error"]["code"]).inc()
        return JSONResponse(told, told["error"]["code"])

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        limit = server.llm.model_config.max_model_len
        one = {"id": server.name, "object": "model", "owned_by": "rosellm", "max_model_len": limit}
        return {"object": "list", "data": [one]}

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({}, 200 if server.manager.is_open else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(prometheus.generate_latest(), media_type=prometheus.CONTENT_TYPE_LATEST)

    return app


def run(argv: list[str] | None) -> None:
    parser = OneLineParser(prog="python -m rosellm.serve", description=__doc__)
    add = parser.add_argument
    add("model", nargs="?", default=SHIPPED, help="shipped model, folder or hub id")
    add("--host", default="127.0.0.1", help="another one requires an API key")
    add("--port", type=whole_number(0, 65535), default=8000)
    add("--api-key", metavar="KEY", help="default: the environment variable ROSELLM_API_KEY, or none")
    add("--served-model-name", metavar="NAME", help="default: the model's name")
    add("--max-in-flight", type=whole_number(1), default=1024, help="requests beyond are answered with 429")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--load-format", default="auto")
    add("--max-model-len", type=whole_number(1))
    add("--max-num-seqs", type=whole_number(1), default=256)
    add("--tensor-parallel-size", type=whole_number(1), default=1)
    options = parser.parse_args(argv)
    if options.host not in LOOPBACK and not (options.api_key or os.environ.get("ROSELLM_API_KEY")):
        raise OptionError(f"host {options.host} can be reached from elsewhere; set --api-key")
    own = {name: value for name, value in vars(options).items() if name not in OF_THE_SERVER}
    llm = LLM(prefix_cache=True, **own)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn drains, then raises the signal again
    uvicorn.run(build_app(Server(llm, options)), host=options.host, port=options.port, log_level="warning")


main = command(run)

if __name__ == "__main__":
    raise SystemExit(main())
