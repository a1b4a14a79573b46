"""What weights, keys and values of 8 bits gain and cost: ``python -m rosellm.bench formats``.

Speed: engines of every format take turns at the same requests of random token ids. Quality, for
``--windows`` above 0: each format's perplexity on held-out text, and how far its distributions of the next
token are from those of fp32 weights: their mean KL divergence, by position.
"""

from __future__ import annotations

import random
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rosellm.bench.options import add_common_options, count, counts
from rosellm.bench.prompts import make_prompts, new_tokens, request_params
from rosellm.bench.record import check_writable, engine_facts, new_record, write_record
from rosellm.bench.workloads import MODEL_WORKLOADS, Workload
from rosellm.errors import OptionError, describe
from rosellm.models.attention import CausalAttention
from rosellm.models.calibration import calibrated, windows_of
from rosellm.models.loading import arch_of, load_parts
from rosellm.models.model import Transformer
from rosellm.models.quantized import CODES, WEIGHT_FORMS, QuantizedProjection, rounded_heads
from rosellm.models.tokenizer import Tokenizer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.layers.choosers import HEAD_DIGITS
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.tensor_parallel import load_engine
from rosellm.rosetrainer.corpus import read_corpus
from rosellm.rosetrainer.training import token_stream

PLAIN = "none"  # weights, keys and values in the engine's dtype
KV = "kv-"  # before the format of keys and values
FORMATS = (PLAIN, *WEIGHT_FORMS, *(KV + form for form in CODES))
BLOCK = 64  # tokens of a KV block
POSITIONS = 64  # of a bucket of KL divergences
WINDOW = 512  # tokens, at most
CALIBRATED, TEXTS, LENGTH = "int4, calibrated", 12, 9000  # training texts, characters of each


class Runs(NamedTuple):
    """Requests that every engine runs. new_tokens: of each. rows: how many run together, at most."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    new_tokens: list[int]
    rows: int

    @property
    def n_tokens(self) -> int:
        """The number of tokens by which speeds are given: new ones or, with one each, the prompts'."""
        return sum(self.new_tokens) if max(self.new_tokens) > 1 else sum(map(len, self.prompts))

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each request, prompt and output."""
        return [len(prompt) + n for prompt, n in zip(self.prompts, self.new_tokens, strict=True)]


def add_to(parser: ArgumentParser) -> None:
    """Add this benchmark's options, and :func:`run` as the parser's default ``run``."""
    add = add_common_options(parser, __doc__, run)
    add(
        "--formats",
        nargs="+",
        default=FORMATS[:3],
        help=f"of {', '.join(FORMATS)}; joined by +, as fp8+kv-fp8",
    )
    add("--rows", **counts((1, 8, 64), 256), help="requests that run together")
    add("--prompt-tokens", **count(1), help="random token ids of every prompt")
    add("--new-tokens", **count(128), help="tokens of every answer")
    add("--workloads", nargs="+", choices=MODEL_WORKLOADS, metavar="ID", help="instead of --rows")
    add("--turns", **count(3), help="measured runs of each engine")
    add("--windows", **count(0, low=0), help=f"windows of {WINDOW} held-out tokens, for quality")


def run(given: Namespace) -> None:
    """Measure, print, and write the record if asked for."""
    if given.json:
        check_writable(given.json)
    if given.windows and given.load_format == "dummy":
        raise OptionError("random weights have no quality; leave out --windows or --load-format dummy")
    formats = {name: parse_format(name) for name in given.formats}
    quality = measure_quality(given, formats) if given.windows else {}
    runs, engines = _load(given, formats)
    weight_bytes = {name: weight_bytes_of(engine.model) for name, engine in engines.items()}
    seconds = {}
    for key, one in runs.items():
        seconds[key] = in_turns(engines, one, given.turns)
        speeds = {name: one.n_tokens / median(own) for name, own in seconds[key].items()}
        first = next(iter(speeds.values()))
        each = (f"{name} {speed:9.0f} ({speed / first:.2f})" for name, speed in speeds.items())
        print(f"{key:>4}: tok/s {', '.join(each)}", flush=True)
    if given.json:
        first_engine = next(iter(engines.values()))
        facts = {"model": given.model, "load_format": given.load_format, "engine": engine_facts(first_engine)}
        if not given.workloads:
            facts |= {"prompt_tokens": given.prompt_tokens, "new_tokens": given.new_tokens}
        figures = {"seconds": seconds, "weight_bytes": weight_bytes, "quality": quality}
        figures["tokens"] = {key: one.n_tokens for key, one in runs.items()}
        write_record(given.json, new_record("formats", first_engine.device, **facts, figures=figures))


def parse_format(name: str) -> tuple[str | None, str | None]:
    """Return the formats of the weights, and of keys and values, of a name such as "fp8+kv-int8"."""
    weights, heads = None, None
    for part in name.split("+"):
        if part not in FORMATS:
            raise OptionError(f"--formats: {describe(part)} is unknown; use {', '.join(FORMATS)}")
        is_twice = heads if part.startswith(KV) else weights if part != PLAIN else len(name) > len(PLAIN)
        if is_twice:
            raise OptionError(f"--formats: {name!r} names two formats of the same kind, or none and another")
        if part.startswith(KV):
            heads = part.removeprefix(KV)
        elif part != PLAIN:
            weights = part
    return weights, heads


def _load(
    given: Namespace, formats: dict[str, tuple[str | None, str | None]]
) -> tuple[dict[str, Runs], dict[str, Engine]]:
    source: dict[str, Any] = {"device": given.device, "dtype": given.dtype, "load_format": given.load_format}
    vocab = arch_of(given.model, given.load_format).vocab_size
    if given.workloads:
        runs = {name: _workload(MODEL_WORKLOADS[name], vocab) for name in given.workloads}
    else:
        runs = {str(rows): _equal(given, rows, vocab) for rows in given.rows}
    source |= {"max_batch_size": max(one.rows for one in runs.values()), "block_size": BLOCK}
    source |= {"max_model_len": max(max(one.lengths) for one in runs.values())}
    n_blocks = (sum(blocks_for(length, BLOCK) + 1 for length in one.lengths) for one in runs.values())
    source |= {"num_kv_blocks": max(n_blocks)}
    engines = {}
    for name, (weights, heads) in formats.items():
        engines[name] = load_engine(
            given.model, quantization=weights, kv_cache_dtype=heads or "auto", **source
        )
    return runs, engines


def _equal(given: Namespace, rows: int, vocab: int) -> Runs:
    draw = random.Random(0)
    prompts = [[draw.randrange(vocab) for _ in range(given.prompt_tokens)] for _ in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=given.new_tokens, ignore_eos=True)
    return Runs(prompts, [params] * rows, [given.new_tokens] * rows, rows)


def _workload(workload: Workload, vocab: int) -> Runs:
    options = Namespace(**workload.flags(), seed=0)
    prompts = [prompt for prompt in make_prompts(options, vocab) if isinstance(prompt, list)]
    return Runs(prompts, request_params(options), new_tokens(options), workload.max_batch_size)


def in_turns(engines: dict[str, Engine], given: Runs, turns: int) -> dict[str, list[float]]:
    """Return the seconds of every measured run by each engine, after one for warm-up."""
    seconds: dict[str, list[float]] = {form: [] for form in engines}
    config = SchedulerConfig(max_batch_size=given.rows)
    for turn in range(1 + turns):
        for form, engine in engines.items():
            start = perf_counter()
            OfflineScheduler(engine, config).run(given.prompts, given.params)
            if turn:
                seconds[form].append(perf_counter() - start)
    return seconds


def weight_bytes_of(model: Transformer) -> dict[str, int]:
    """Return the bytes of the layers' projections, and of all other parameters."""
    projections = tuple(f".{name}.weight" for name in model.config.shapes)
    sizes = {"projections": 0, "others": 0}
    for name, parameter in model.own_parameters.items():
        sizes["projections" if name.endswith(projections) else "others"] += parameter.nbytes
    return sizes


@torch.inference_mode()
def measure_quality(given: Namespace, formats: dict[str, tuple[str | None, str | None]]) -> dict[str, Any]:
    """Return each format's perplexity on held-out text, and its mean KL divergence from fp32 by position.

    Activations are in fp32; further entries for quantised weights round them to two digits or to one. For
    "int4" there are those of a calibrated model, too.
    """
    load = {"device": given.device, "dtype": "float32", "load_format": given.load_format}
    exact, tokenizer = load_parts(given.model, **load)
    assert isinstance(tokenizer, Tokenizer)
    length = min(WINDOW, exact.config.n_positions)
    corpus = read_corpus()
    stream = token_stream(corpus.validation, tokenizer, exact.device)
    windows = [stream[i * length : (i + 1) * length + 1] for i in range(given.windows)]
    windows = [window for window in windows if len(window) == length + 1]
    models: dict[str | None, Transformer] = {None: exact}
    for weights, _ in formats.values():
        if weights not in models:
            models[weights], _ = load_parts(given.model, **load, quantization=weights)
    found: dict[str, dict[str, Any]] = {}
    expected = [log_probabilities(exact, window) for window in windows]
    if "int4" in models:
        texts = [source.text[:LENGTH] for source in corpus.train[:: max(1, len(corpus.train) // TEXTS)]]
        models[CALIBRATED] = calibrated(exact, windows_of(texts, tokenizer, length), exact.device)
        formats = formats | {CALIBRATED: (CALIBRATED, None)}
    for name, (weights, heads) in ({PLAIN: (None, None)} | formats).items():
        for digits in (None, 2, 1) if weights else (None,):
            key = name if digits is None else f"{name}, activations of {digits} digit{'s' * (digits > 1)}"
            set_digits(models[weights], digits)
            own = (log_probabilities(models[weights], window, heads) for window in windows)
            found[key] = _distance(expected, own, windows)
            kl = found[key]["kl"]
            print(
                f"{key:35} perplexity {found[key]['perplexity']:.4f}, KL divergence {kl:.6f} nats per token"
            )
    return {"windows": len(windows), "tokens": length, "bucket": POSITIONS, "formats": found}


def set_digits(model: Transformer, digits: int | None) -> None:
    """Round the inputs of a quantised model's projections to this number of codes; None leaves them exact.

    Those of the head have ``HEAD_DIGITS`` in any case.
    """
    for module in model.modules():
        if isinstance(module, QuantizedProjection):
            module.digits = HEAD_DIGITS if digits and module is model.lm_head else digits


def log_probabilities(model: Transformer, window: Tensor, heads: str | None = None) -> Tensor:
    """Return the log-probabilities ``[T, V]`` of the next tokens. heads: the format of keys and values."""
    ids, config = window[:-1], model.config
    whole = CausalAttention([len(ids)], ids.device, config.scale, config.window)

    def rounding(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return whole(layer, q, rounded_heads(k, str(heads)), rounded_heads(v, str(heads)))

    attend = whole if heads is None else rounding
    hidden = model(ids, torch.arange(len(ids), device=ids.device), attend)
    return model.logits(hidden).float().log_softmax(-1)


def _distance(expected: list[Tensor], found: Iterable[Tensor], windows: list[Tensor]) -> dict[str, Any]:
    losses, away = [], []
    for wanted, own, window in zip(expected, found, windows, strict=True):
        losses.append(-own.gather(1, window[1:, None]).mean().item())
        away.append((wanted.exp() * (wanted - own)).sum(-1))
    kl = torch.stack(away).mean(0)  # [T]
    perplexity = torch.tensor(losses).double().mean().exp().item()
    by_position = [one.mean().item() for one in kl.split(POSITIONS)]
    return {"perplexity": perplexity, "kl": kl.mean().item(), "kl_by_position": by_position}
