"""What weights of 8 bits gain and cost: ``python -m rosellm.bench formats --model rose-tiny``.

Speed: engines with weights of every format take turns at the same requests of random token ids. Quality, for
``--windows`` above 0: each format's perplexity on held-out text, and how far its distributions of the next
token are from those of fp32 weights: their mean KL divergence, by position.
"""

from __future__ import annotations

import random
from argparse import ArgumentParser, Namespace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rosellm.bench.options import add_common_options, count, counts
from rosellm.bench.record import check_writable, engine_facts, new_record, write_record
from rosellm.errors import OptionError
from rosellm.models.loading import load_parts
from rosellm.models.model import Transformer
from rosellm.models.quantized import CODES, QuantizedProjection
from rosellm.models.tokenizer import Tokenizer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.tensor_parallel import load_engine
from rosellm.rosetrainer.corpus import read_corpus
from rosellm.rosetrainer.training import token_stream, window_logits

PLAIN = "none"  # weights in the engine's dtype
FORMATS = (PLAIN, *CODES)
POSITIONS = 64  # of a bucket of KL divergences
WINDOW = 512  # tokens, at most


def add_to(parser: ArgumentParser) -> None:
    """Add this benchmark's options, and :func:`run` as the parser's default ``run``."""
    add = add_common_options(parser, __doc__, run)
    add("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="default: all")
    add("--rows", **counts((1, 8, 64), 256), help="requests that run together")
    add("--prompt-tokens", **count(1), help="random token ids of every prompt")
    add("--new-tokens", **count(128), help="tokens of every answer")
    add("--turns", **count(3), help="measured runs of each engine")
    add("--windows", **count(0, low=0), help=f"windows of {WINDOW} held-out tokens, for quality")


def run(given: Namespace) -> None:
    """Measure, print, and write the record if asked for."""
    if given.json:
        check_writable(given.json)
    if given.windows and given.load_format == "dummy":
        raise OptionError("random weights have no quality; leave out --windows or --load-format dummy")
    quality = measure_quality(given) if given.windows else {}
    engines = _engines(given)
    weight_bytes = {form: weight_bytes_of(engine.model) for form, engine in engines.items()}
    seconds = {}
    for rows in given.rows:
        seconds[rows] = in_turns(engines, given, rows)
        n_tokens = rows * (given.new_tokens if given.new_tokens > 1 else given.prompt_tokens)
        speeds = {form: n_tokens / median(own) for form, own in seconds[rows].items()}
        first = next(iter(speeds.values()))
        each = (f"{form} {speed:9.0f} ({speed / first:.2f})" for form, speed in speeds.items())
        print(f"× {rows:3}: tok/s {', '.join(each)}", flush=True)
    if given.json:
        first_engine = next(iter(engines.values()))
        facts = {"model": given.model, "load_format": given.load_format, "engine": engine_facts(first_engine)}
        facts |= {"prompt_tokens": given.prompt_tokens, "new_tokens": given.new_tokens}
        figures = {"seconds": seconds, "weight_bytes": weight_bytes, "quality": quality}
        write_record(given.json, new_record("formats", first_engine.device, **facts, figures=figures))


def _engines(given: Namespace) -> dict[str, Engine]:
    source = {"device": given.device, "dtype": given.dtype, "load_format": given.load_format}
    length = given.prompt_tokens + given.new_tokens
    source |= {"max_batch_size": max(given.rows), "max_model_len": length}
    forms = {form: None if form == PLAIN else form for form in given.formats}
    return {name: load_engine(given.model, quantization=form, **source) for name, form in forms.items()}


def in_turns(engines: dict[str, Engine], given: Namespace, rows: int) -> dict[str, list[float]]:
    """Return the seconds of every measured run of ``rows`` requests by each engine, after one for warm-up."""
    draw = random.Random(0)
    vocab = next(iter(engines.values())).config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(given.prompt_tokens)] for _ in range(rows)]
    params = [SamplingParams(temperature=0.0, max_tokens=given.new_tokens, ignore_eos=True)] * rows
    seconds: dict[str, list[float]] = {form: [] for form in engines}
    for turn in range(1 + given.turns):
        for form, engine in engines.items():
            start = perf_counter()
            OfflineScheduler(engine).run(prompts, params)
            if turn:
                seconds[form].append(perf_counter() - start)
    return seconds


def weight_bytes_of(model: Transformer) -> dict[str, int]:
    """Return the bytes of the layers' projections, and of all other parameters."""
    projections = {f"blocks.{i}.{name}" for i in range(model.config.n_layers) for name in model.config.shapes}
    named = dict(model.named_modules())
    sizes = {"projections": 0, "others": 0}
    for name in projections:
        weight = named[name].weight
        parts = (weight.codes, weight.scales) if isinstance(named[name], QuantizedProjection) else (weight,)
        sizes["projections"] += sum(part.nbytes for part in parts)
    for name, parameter in model.own_parameters.items():
        if isinstance(parameter, Tensor) and name.removesuffix(".weight") not in projections:
            sizes["others"] += parameter.nbytes
    return sizes


@torch.inference_mode()
def measure_quality(given: Namespace) -> dict[str, Any]:
    """Return each format's perplexity on held-out text, and its mean KL divergence from fp32 by position.

    Activations are in fp32, so the formats' weights are all that differs.
    """
    load = {"device": given.device, "dtype": "float32", "load_format": given.load_format}
    exact, tokenizer = load_parts(given.model, **load)
    assert isinstance(tokenizer, Tokenizer)
    length = min(WINDOW, exact.config.n_positions)
    stream = token_stream(read_corpus().validation, tokenizer, exact.device)
    windows = [stream[i * length : (i + 1) * length + 1] for i in range(given.windows)]
    windows = [window for window in windows if len(window) == length + 1]
    models = {PLAIN: exact}
    for form in given.formats:
        if form != PLAIN:
            models[form], _ = load_parts(given.model, **load, quantization=form)
    losses: dict[str, list[float]] = {form: [] for form in models}
    away: dict[str, list[Tensor]] = {form: [] for form in models}
    for window in windows:
        logits = {form: window_logits(model, window[None]).log_softmax(-1) for form, model in models.items()}
        for form, own in logits.items():
            losses[form].append(-own.gather(1, window[1:, None]).mean().item())
            away[form].append((logits[PLAIN].exp() * (logits[PLAIN] - own)).sum(-1))
    found: dict[str, dict[str, Any]] = {}
    for form in models:
        kl = torch.stack(away[form]).mean(0)  # [T]
        perplexity = torch.tensor(losses[form]).double().mean().exp().item()
        found[form] = {"perplexity": perplexity, "kl": kl.mean().item()}
        found[form]["kl_by_position"] = [one.mean().item() for one in kl.split(POSITIONS)]
        print(f"{form:6} perplexity {perplexity:.4f}, KL divergence {found[form]['kl']:.6f} nats per token")
    return {"windows": len(windows), "tokens": length, "bucket": POSITIONS, "formats": found}
