"""Stream requests over replicas while one of them is killed."""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from rosellm.cluster.replicas import Replicas
from rosellm.cluster.runtime import import_ray
from rosellm.errors import RoseError
from rosellm.roseinfer.llm import LLM
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.streaming import StreamingManager


@dataclass(frozen=True)
class Streamed:
    """Arrival times of pieces and of the kill in seconds from the first submission, and each request's text.

    n_moved: the requests of the killed replica, which continued elsewhere.
    """

    pieces_s: list[float]
    texts: list[str]
    killed_s: float
    n_moved: int


def stream_with_a_death(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, after_tokens: int
) -> Streamed:
    """Stream these requests from an LLM of replicas; kill a replica after ``after_tokens`` tokens in total.

    Raises ``RoseError`` for an LLM with a single engine.
    """
    replicas, inbox = llm.served, SimpleQueue[Any]()
    if not isinstance(replicas, Replicas):
        raise RoseError("only a replica can be killed; give an LLM with data_parallel_size")
    pieces_s: list[float] = []
    killed_s, n_moved = 0.0, 0
    with StreamingManager(llm) as manager:
        start = perf_counter()
        texts = {manager.add_request(prompt, params, inbox): "" for prompt in prompts}
        left = len(texts)
        while left:
            request_id, piece = inbox.get()
            left -= piece is None
            if piece:
                texts[request_id] += piece
                pieces_s.append(perf_counter() - start)
            n_tokens = sum(len(manager.metrics(one).token_times) for one in texts)
            if n_tokens >= after_tokens and not killed_s:
                victim = replicas.router.live[0]
                n_moved, killed_s = len(replicas.router.running(victim)), perf_counter() - start
                import_ray().kill(replicas.seats[victim].actor)
        for request_id in texts:
            manager.result(request_id)
    return Streamed(pieces_s, list(texts.values()), killed_s, n_moved)
