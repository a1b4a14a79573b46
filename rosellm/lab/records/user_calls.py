"""Measure what users call beside the scheduler beneath it, in turns on one engine.

``LLM.generate`` with the text of every completion, and streams of a ``StreamingManager``, read by a thread
each, at most 256, or all by one thread from an inbox, added one by one or in one call; the scheduler gets
token ids and gives token ids. The record, renewed after each workload, is DIR/user_calls.json, of another
model than W3's own in DIR/MODEL; it keeps what it has of the same commit.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier
from time import perf_counter
from typing import Any

import torch

from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.lab.records.earlier import kept_parts
from rosellm.lab.records.jobs import BENCHMARKS
from rosellm.lab.records.measured_model import add_model_options, folder_of, settle, workloads_named
from rosellm.lab.records.parameters import model_path
from rosellm.lab.records.records import Results
from rosellm.lab.records.step_time import free_memory
from rosellm.lab.records.turns import in_turns
from rosellm.roseinfer.bench.prompts import Prompts, make_prompts, request_params
from rosellm.roseinfer.bench.record import check_writable, engine_facts, new_record, write_record
from rosellm.roseinfer.bench.runs import check_served, run_figures
from rosellm.roseinfer.bench.workloads import DTYPE, WORKLOADS, Workload
from rosellm.roseinfer.llm import LLM
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.asked import one_each
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager

NAME = "user_calls"
MEASURED = "W3,W4,W6,W8"
BENEATH, GENERATE = "OfflineScheduler", "LLM.generate"
STREAMS, INBOX = "StreamingManager", "StreamingManager, one inbox"
ONE_CALL = f"{INBOX}, one call"
AIM_SHARE = 0.95  # of the throughput of the scheduler beneath
READERS = 256
RUN_S = 1.0  # on a GPU: the calls of a run take so long together

Timed = tuple[list[RequestOutput], float]  # and seconds


def run_scheduler(llm: LLM, prompts: Prompts, params: list[SamplingParams]) -> Timed:
    """Token ids in, token ids out."""
    ids = llm.engine.encode_many(prompts)
    start = perf_counter()
    config = SchedulerConfig(max_batch_size=llm.engine.max_batch_size)
    outputs = OfflineScheduler(llm.engine, config).run(ids, params)
    return outputs, perf_counter() - start


def generate(llm: LLM, prompts: Prompts, params: list[SamplingParams]) -> Timed:
    """Completions, and their texts."""
    start = perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    _ = [output.text for output in outputs]
    return outputs, perf_counter() - start


def stream(llm: LLM, prompts: Prompts, params: list[SamplingParams]) -> Timed:
    """Pieces of text, read as they come by one thread a request, as many at a time as there are readers.

    As in a server, the manager and the threads are there before the first request.
    """
    readers = min(READERS, len(prompts))
    with StreamingManager(llm) as manager, ThreadPoolExecutor(readers) as threads:
        together = Barrier(readers)
        list(threads.map(lambda _: together.wait(), range(readers)))
        start = perf_counter()
        ids = [manager.add_request(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        list(threads.map(lambda one: deque(manager.stream_text(one), maxlen=0), ids))
        seconds = perf_counter() - start
        return [manager.result(request_id) for request_id in ids], seconds


def follow(llm: LLM, prompts: Prompts, params: list[SamplingParams]) -> Timed:
    """The same pieces, all of them read by this thread from one inbox, as an event loop's would be."""
    each = list(zip(prompts, params, strict=True))
    return _followed(llm, lambda manager, inbox: [manager.add_request(*one, inbox) for one in each])


def follow_added_together(llm: LLM, prompts: Prompts, params: list[SamplingParams]) -> Timed:
    """As :func:`follow`, of requests that are added in one call."""
    return _followed(llm, lambda manager, inbox: manager.add_requests(prompts, params, inbox))


def _followed(llm: LLM, add: Callable[[StreamingManager, SimpleQueue], list[int]]) -> Timed:
    inbox: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
    with StreamingManager(llm) as manager:
        start = perf_counter()
        ids = add(manager, inbox)
        left = len(ids)
        while left:
            left -= inbox.get()[1] is None
        seconds = perf_counter() - start
        return [manager.result(request_id) for request_id in ids], seconds


CALLS: dict[str, Callable[[LLM, Prompts, list[SamplingParams]], Timed]] = {
    BENEATH: run_scheduler,
    GENERATE: generate,
    STREAMS: stream,
    INBOX: follow,
    ONE_CALL: follow_added_together,
}


def measure(arguments: Namespace) -> None:
    """Each workload's calls; the record is renewed, and what was found told, after each.

    Raises ``RecordError``, before it measures, if the record would lose other workloads.
    """
    path = check_writable(folder_of(arguments.output, arguments.model, WORKLOADS["W3"]) / f"{NAME}.json")
    figures = kept_parts(path, _record(arguments, {}), [workload.id for workload in arguments.workloads])
    for workload in arguments.workloads:
        figures[workload.id] = measure_calls(arguments, workload)
        write_record(path, _record(arguments, figures))
        print(told(workload.id, figures[workload.id]), flush=True)
        free_memory()


def _record(arguments: Namespace, figures: dict[str, Any]) -> dict[str, Any]:
    facts = {"model": arguments.model, "load_format": arguments.load_format, "readers": READERS}
    facts["size"] = arguments.size.name
    ordered = {name: figures[name] for name in WORKLOADS if name in figures}
    return new_record(NAME, torch.device(arguments.device), **facts, figures=ordered)


def measure_calls(arguments: Namespace, workload: Workload) -> dict[str, Any]:
    """Way to call → its runs, on an ``LLM`` that is made as users make it."""
    given = arguments.size.options(workload)
    benchmark = BENCHMARKS[workload.form]
    options = benchmark.parse_options([str(text) for pair in given.items() for text in pair])
    llm = LLM(
        model_path(arguments.model),
        device=arguments.device,
        dtype=DTYPE if arguments.device == "cuda" else "auto",
        load_format=arguments.load_format,
        max_batch_size=options.max_batch_size,
    )
    prompts = make_prompts(options, llm.engine.config.vocab_size)
    params = one_each(request_params(options), len(prompts))
    seconds = RUN_S if arguments.device == "cuda" else 0.0
    calls = {way: partial(call, llm, prompts, params) for way, call in CALLS.items()}
    runs = {way: partial(_run, call, seconds) for way, call in calls.items()}
    figures: dict[str, Any] = in_turns(runs, arguments.repeats)
    return figures | {"engine": engine_facts(llm.engine)}


def _run(call: Callable[[], Timed], seconds: float) -> dict[str, Any]:
    """The figures of as many calls as take so long together, of one if that takes longer."""
    tokens: list[list[int]] = []
    taken = 0.0
    while not tokens or taken < seconds:
        outputs, one = call()
        check_served(outputs)
        tokens += [output.token_ids for output in outputs]
        taken += one
    return run_figures(tokens, taken, None)


def rate(figures: dict[str, Any], way: str) -> float:
    """The median throughput, tokens a second."""
    return figures[way]["medians"]["total_throughput_tok_s"]


def shares(figures: dict[str, Any]) -> dict[str, float]:
    """Way to call, of those recorded → its throughput over that of the scheduler beneath."""
    ways = [way for way in CALLS if way != BENEATH and way in figures]
    return {way: rate(figures, way) / rate(figures, BENEATH) for way in ways}


def recorded(results: Results) -> dict[str, dict[str, Any]]:
    """Workload → the recorded figures, none if there are none yet."""
    return results.load(NAME)["figures"] if NAME in results.names() else {}


def told(name: str, figures: dict[str, Any]) -> str:
    """A workload's medians in one line."""
    each = (f"{way} {rate(figures, way):,.0f} ({share:.1%})" for way, share in shares(figures).items())
    return f"{name}, tok/s: {BENEATH} {rate(figures, BENEATH):,.0f}, {', '.join(each)}"


def _parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m rosellm.lab.records.{NAME}", description=__doc__)
    add_model_options(parser)
    add = parser.add_argument
    add("--workloads", default=MEASURED, metavar="ID,ID", help=f"default: {MEASURED}")
    add("--repeats", type=whole_number(1), default=3, metavar="N", help="measured runs of each way")
    add("--output", type=Path, required=True, metavar="DIR", help="folder of the record")
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Check the names, then measure."""
    arguments = settle(_parser().parse_args(argv), WORKLOADS["W3"])
    arguments.workloads = workloads_named(arguments.workloads)
    measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
