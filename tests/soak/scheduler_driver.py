"""Random operations on a scheduler: every request ends once, with the tokens an ample pool gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from rosellm.errors import LongPromptError, OverloadError, PromptError, RoseError
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from tests.helpers import random_prompts
from tests.soak.fake_step import (
    BEGINS,
    BLOCK,
    EOS,
    N_POSITIONS,
    VOCAB,
    call_before,
    fake_engine,
    poison,
    tokens_after,
)
from tests.soak.programs import Driver, one_of

MOST_IN_FLIGHT = 10
LONGEST_PROMPT, MOST_TOKENS = 20, 25
DOCUMENTS = random_prompts([LONGEST_PROMPT] * 3, seed=1, vocab_size=VOCAB)
UNKNOWN = 10**6


class FaultError(RuntimeError):
    """What a step is made to raise."""


@dataclass(eq=False)
class Asked:
    """A request, the tokens that it must come to if nobody interferes, and who has."""

    prompt: list[int]
    tokens: list[int]
    reason: str
    cancelled: bool = False
    failed: bool = False

    @classmethod
    def of(cls, prompt: list[int], params: SamplingParams, following: Sequence[int], room: int) -> Asked:
        """``following``: what comes after the prompt, as if nothing ended it; ``room``: for prompt and it."""
        tokens = list(following[: min(params.max_tokens, room - len(prompt))])
        if params.ignore_eos or EOS not in tokens:
            return cls(prompt, tokens, "length")
        return cls(prompt, tokens[: tokens.index(EOS) + 1], "stop")

    def judge(self, output: RequestOutput) -> None:
        """The tokens of a run with an ample pool, or as many of them as came before the end."""
        n_tokens = len(output.token_ids)
        assert output.prompt_token_ids == self.prompt
        assert output.token_ids == self.tokens[:n_tokens]
        assert len(output.metrics.token_times) == n_tokens
        assert (output.error is None) == (output.finish_reason != "failed")
        if output.finish_reason == self.reason:
            assert n_tokens == len(self.tokens)
        else:
            assert {"cancelled": self.cancelled, "failed": self.failed}[output.finish_reason]


class SchedulerDriver(Driver):
    """Requests come, are cancelled and end over a small pool; the model under them is a function."""

    weights = {
        "add": 16, "add_many": 4, "step": 70, "cancel": 5, "take": 10, "cancel_all": 1, "fault": 1,
        "forget_prefixes": 2, "misuse": 2, "poison": 2,
    }  # fmt: skip
    axes = {
        "run_ahead_and_replays": ((0, False), (3, False), (0, True), (3, True), (1, False)),
        "n_blocks": (8, 6, 12, 30),
        "prefix_cache": (False, True),
        "admission_policy": ("fifo", "pack"),
        "prefill_token_budget": (64, 7, 1),
        "prefill_chunk": (None, 3),
        "max_batch_size": (4, 2, 1),
    }

    def open(
        self,
        admission_policy: str,
        prefill_token_budget: int,
        prefill_chunk: int | None,
        run_ahead_and_replays: tuple[int, bool],
        n_blocks: int,
        **options,
    ) -> None:
        run_ahead, replays = run_ahead_and_replays
        self.engine = fake_engine(run_ahead, num_kv_blocks=n_blocks, **options)
        self.engine.deterministic = replays  # whoever is preempted decodes its output again
        config = SchedulerConfig(
            admission_policy=admission_policy,
            prefill_token_budget=prefill_token_budget,
            prefill_chunk=prefill_chunk,
            pack_lookahead=4,
            fifo_every=3,
            max_in_flight=MOST_IN_FLIGHT,
        )
        self.scheduler = OnlineScheduler(self.engine, config)
        self.running: dict[int, Asked] = {}
        self.ended: dict[int, RequestOutput] = {}  # and not taken
        self.fault_in: int | None = None
        call_before(self.engine.step, self._raise_fault, (*BEGINS, "collect"))

    # Operations.

    def add(self, a: int, b: int) -> None:
        self._add([prompt_of(a, b)], params_of(a, b))

    def add_many(self, a: int, b: int) -> None:
        """All or none of four; some of them may be too long for the cache."""
        self._add([prompt_of(a + i, b + 7 * i) for i in range(4)], params_of(a, b))

    def step(self, a: int, b: int) -> bool:
        if not self.running:
            return False
        is_failing = self.fault_in is not None
        try:
            got = self.scheduler.step()
        except FaultError:
            assert is_failing and self.fault_in is None
            assert self.scheduler.n_active == 0
            for asked in self.running.values():
                asked.failed = True
            self.seen["faults"] += 1
            return True
        assert len(set(got)) == len(got)
        for sequence in got:
            n_output = sequence.n_output
            is_poisoned = self.running[sequence.request_id].failed
            assert is_poisoned if sequence.finish_reason == "failed" else n_output > 0
            assert sequence.output == self.running[sequence.request_id].tokens[:n_output]
        return True

    @one_of("known")
    def cancel(self, request_id: int, b: int) -> None:
        """A request that runs, or one that has ended, which is too late."""
        if request_id in self.running:
            self.running[request_id].cancelled = True
            assert self.scheduler.cancel(request_id)
            assert self.scheduler.finished[request_id].finish_reason == "cancelled"
        else:
            assert not self.scheduler.cancel(request_id)

    def cancel_all(self, a: int, b: int) -> bool:
        for asked in self.running.values():
            asked.cancelled = True
        self.scheduler.cancel_all()
        assert not self.scheduler.has_unfinished
        return bool(self.running)

    @one_of("ended")
    def take(self, request_id: int, b: int) -> None:
        assert self.scheduler.take_result(request_id) is self.ended.pop(request_id)
        self.refused(RoseError, lambda: self.scheduler.take_result(request_id))

    def fault(self, a: int, b: int) -> bool:
        """A step that is begun or collected soon will raise."""
        if self.fault_in is not None:
            return False
        self.fault_in = a % 8
        return True

    def forget_prefixes(self, a: int = 0, b: int = 0) -> bool:
        if self.engine.prefix_cache is None:
            return False
        self.seen["prefix hits"] += self.engine.prefix_cache.hits
        self.engine.prefix_cache.clear()
        return True

    @one_of("running")
    def poison(self, request_id: int, b: int) -> None:
        """The logits of a request are not finite from now on: it fails, and nobody else does."""
        self.running[request_id].failed = True
        poison(self.engine, request_id)

    def misuse(self, a: int, b: int) -> None:
        """Unknown and unfinished requests, and prompts that can never run."""
        self.refused(RoseError, lambda: self.scheduler.cancel(UNKNOWN))
        self.refused(RoseError, lambda: self.scheduler.take_result(next(iter(self.running), UNKNOWN)))
        if len(self.running) < MOST_IN_FLIGHT:
            params = SamplingParams(max_tokens=N_POSITIONS)
            for bad in ([], [VOCAB], [1] * N_POSITIONS):
                self.refused(PromptError, lambda bad=bad: self.scheduler.add_request(bad, params))

    # What must hold.

    def check(self) -> None:
        for request_id in self.scheduler.finished.keys() - self.ended.keys():
            output = self.ended[request_id] = self.scheduler.finished[request_id]
            self.running.pop(request_id).judge(output)  # a second end finds nobody
            self.seen[output.finish_reason] += 1
        assert self.scheduler.finished.keys() == self.ended.keys()
        assert self.scheduler.n_waiting + self.scheduler.n_active == len(self.running)
        assert self.scheduler.has_unfinished == bool(self.running)
        assert self.scheduler.n_active <= self.scheduler.max_batch_size
        holders = [sequence.block_ids for sequence in self.scheduler.requests.values()]
        if self.engine.prefix_cache is not None:
            holders += self.engine.prefix_cache.entries.values()
        self.engine.blocks.check_integrity(Counter(chain.from_iterable(holders)))

    def end(self) -> None:
        self.fault_in = None
        for _ in range(100 * (LONGEST_PROMPT + MOST_TOKENS) * MOST_IN_FLIGHT):
            if not self.running:
                break
            self.apply("step", 0, 0)
        assert not self.running, f"{len(self.running)} requests never end"
        self.seen["preemptions"] += self.scheduler.preemptions
        self.forget_prefixes()
        self.check()
        assert self.engine.blocks.num_free_blocks() == self.engine.num_kv_blocks
        assert self.engine.budget.reserved == 0

    # The model.

    @property
    def known(self) -> list[int]:
        return [*self.running, *self.ended]

    def _add(self, prompts: list[list[int]], params: SamplingParams) -> None:
        room = self.engine.num_kv_blocks * BLOCK + 1
        if len(self.running) + len(prompts) > MOST_IN_FLIGHT:
            self.refused(OverloadError, lambda: self.scheduler.add_requests(prompts, params))
        elif max(map(len, prompts)) >= room:
            self.refused(LongPromptError, lambda: self.scheduler.add_requests(prompts, params))
        else:
            for request_id, prompt in zip(self.scheduler.add_requests(prompts, params), prompts, strict=True):
                assert request_id not in self.running
                self.running[request_id] = Asked.of(prompt, params, tokens_after(tuple(prompt)), room)

    def _raise_fault(self) -> None:
        if self.fault_in is None:
            return
        if self.fault_in == 0:
            self.fault_in = None
            for sequence in self.scheduler._active[: self.engine.budget.free]:
                self.engine.blocks.reserve_prompt(sequence.block_ids, 1)  # the step was half begun
            raise FaultError("a step is made to fail")
        self.fault_in -= 1


def prompt_of(a: int, b: int) -> list[int]:
    """The beginning of one of three documents, and one of two last tokens: 120 prompts in all."""
    return [*DOCUMENTS[a % 3][: b % LONGEST_PROMPT], 1 + a % 2]


def params_of(a: int, b: int) -> SamplingParams:
    """A third is drawn with a seed; half go on past the end of sequence."""
    temperature = float(a % 9 < 3)
    return SamplingParams(
        temperature=temperature, seed=7, max_tokens=1 + 2 * (b // LONGEST_PROMPT), ignore_eos=a >= 128
    )
