"""Does the suite find what it is for? ``python -m tests.plant_faults``: a fault in each part, one at a time.

The test files of the chosen parts must first pass without a fault. Then the checkout is copied, one fault is
planted in the copy, and the test files of that part run there until one fails. ``--checkout`` names another
checkout, such as that of an earlier commit; words choose parts. Not run by ``make test``: it takes some
minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """In the file called ``file``, wherever it is, ``old`` becomes ``new``; names of ``tests`` find it."""

    part: str
    file: str
    tests: str
    old: str
    new: str


# A fault in two lines: where it is and which tests find it; the change.
# fmt: off
FAULTS = (
    Fault("KV blocks", "kv_blocks.py", "test_state_machines.py",
          "n_tokens > 0 and self._refs", "n_tokens < 0 and self._refs"),
    Fault("prefix cache", "prefix_cache.py", "test_state_machines.py",
          "len(tokens) - 1) //", "len(tokens)) //"),
    Fault("block tables", "ladder/rungs.py", "ladder/test_tables.py",
          "map(ne, rows, sent)", "map(lambda a, b: len(a) != len(b), rows, sent)"),
    Fault("staging", "staging.py", "test_resident.py",
          ".copy_(source", ".copy_(source.clamp(max=50)"),
    Fault("device state", "device_state.py", "test_device_state.py test_resident.py",
          "sequence.max_length,", "sequence.max_length + 1,"),
    Fault("advance kernel", "advance.py", "test_device_state.py",
          "(token == stop) | (position + 2 >=", "(token == stop) | (position + 1 >="),
    Fault("attention kernel", "kernels/attention.py", "kernels/test_attention.py",
          "if tile == 0:", "if tile >= 0:"),
    Fault("attention plan", "attention_plan.py", "test_attention_plan.py",
          "first = tl.cdiv((ends - tiles + 1) * filled, total) - 1",
          "first = tl.cdiv((ends - tiles) * filled, total) - 1"),
    Fault("online softmax", "online_softmax.py", "kernels/test_attention.py",
          "l_i = tl.sum(l_i, axis=1)", "l_i = tl.max(l_i, axis=1)"),
    Fault("rotary kernel", "kernels/rotary.py", "test_rotary.py",
          "(second * cos[None, :] + first * sin[None, :])", "(second * cos[None, :] - first * sin[None, :])"),
    Fault("swiglu", "linear.py", "test_linear.py",
          "y = silu(gate) * up", "y = gate * silu(up)"),
    Fault("linear kernel", "linear.py", "test_linear.py",
          "1.5957691216057308", "1.5057691216057308"),
    Fault("norm kernel", "kernels/norm.py", "test_norm.py",
          "tl.sum(centred * centred, axis=0) / C", "tl.sum(centred * centred, axis=0) / x.shape[0]"),
    Fault("head kernel", "head.py", "test_head.py",
          "tl.where(columns < N, 0.0", "tl.where(columns <= N, 0.0"),
    Fault("prefill kernel", "kernels/prefill_tiles.py", "test_prefill.py test_prefill_pieces.py",
          "after - before, start + before", "after - before, before"),
    Fault("noise", "noise.py", "test_noise.py test_head.py",
          "(1 / 4294967296) + (0.5 / 4294967296)", "(1 / 4294967296) + (0.2 / 4294967296)"),
    Fault("sampler", "kernels/draw.py", "test_sampling.py",
          "rank >= limit", "rank > limit"),
    Fault("host step", "dense.py", "test_against_transformers.py test_ladder_tokens.py",
          "mask, max(contexts))\n", "mask, max(contexts) - 1)\n"),
    Fault("resident step", "planner.py", "test_resident.py test_streaming.py test_equality_lattice.py",
          "self._left_behind.add(row.index)", "self._left_behind.discard(row.index)"),
    Fault("packed prefill", "prompt_inputs.py", "test_scheduler.py test_equality_lattice.py",
          "ends[:n_whole] - 1", "ends[:n_whole] - added[:n_whole]"),
    Fault("captured prefill", "captured_prefill.py", "test_captured_prefill.py",
          "self.buffer.send_inert(tokens, places)\n        return", "return"),
    Fault("trial", "trial.py", "test_trial.py",
          "len(largest) + len(step.captures())", "len(largest)"),
    Fault("scheduler", "engine.py", "test_scheduler.py",
          "sequence.num_cached_tokens = 0", "sequence.num_cached_tokens -= 1"),
    Fault("admission", "admission.py", "test_scheduler.py",
          "self.extendleft(reversed(kept))", "self.extend(reversed(kept))"),
    Fault("server", "rosellm/serve.py", "test_serve.py",
          "output.prompt_logprobs + entries", "output.prompt_logprobs[1:] + [None] + entries"),
    Fault("replies", "serving/stream.py", "test_event_loop.py",
          "    finally:\n        for reply in replies:", "    finally:\n        for reply in replies[1:]:"),
    Fault("streaming", "streaming.py", "test_streaming.py",
          "stream.inbox.put((stream.request_id, piece))",
          "stream.inbox.put((stream.request_id, piece.strip()))"),
    Fault("text", "text.py", "test_text.py",
          "= min(ends, key", "= max(ends, key"),
    Fault("weights", "weights.py", "test_bad_input.py",
          "not extremes.isfinite().all()", "extremes.isnan().any()"),
    Fault("tokenizer", "tokenizer.py", "test_tokenizer.py",
          "raw.no_truncation()", "raw.no_padding()"),
    Fault("records", "record.py", "bench/test_record.py",
          "float(np.median(column))", "float(np.mean(column))"),
    Fault("batch runner", "run_notebooks.py", "test_run_notebooks.py",
          "default is None or type(value) in",
          "default is None or isinstance(value, bool) or type(value) in"),
    Fault("verdicts", "verdicts.py", "test_verdicts.py",
          "<= 2 * self.spread", "<= self.spread"),
    Fault("floors", "lab/records/records.py", "test_records.py",
          "max_batch_size * one.mean", "max_batch_size + one.mean"),
    Fault("timeline", "timeline.py", "test_timeline.py",
          "np.array([one.busy for", "np.array([one.end - one.start for"),
    Fault("busy chart", "busy.py", "test_busy.py",
          "x=values, y=labels", "x=values[::-1], y=labels"),
    Fault("pages", "page.html.j2", "test_gallery.py",
          '<details class="code">', '<div class="code">'),
    Fault("checker", "check_kernel.py", "test_check_kernel.py",
          "exact)).any():", "exact)).all():"),
    Fault("long cases", "makers.py", "test_wrong_kernels.py",
          "lengths[0] = case.cached", "lengths[0] = 72"),
    Fault("diagnose", "rules.py", "test_rules.py",
          "1 / (1 - min(share", "1 / (1 + min(share"),
    Fault("fleet", "exhibits/plan.py", "exhibits/test_plan.py",
          "/ (ends[n - fleet.most - 1]", "/ (ends[n - 1]"),
    Fault("llama", "families/llama.py", "test_families.py",
          'Norm("rms", 1e-6)', 'Norm("rms", 1e-5)'),
    Fault("rope", "models/rope.py", "test_families.py",
          "dim=1) * amplitude", "dim=1)"),
    Fault("parts of a model", "models/part.py", "test_part.py test_tensor_parallel.py",
          "n_rows // whole.d_ff", "1"),
    Fault("router", "router.py", "test_router.py",
          "-known[replica], self", "known[replica], self"),
    Fault("recipe", "roseinfer/recipe.py", "test_recipe.py",
          "rule.value and broken", "rule.value and not broken"),
    Fault("parameters", "roseinfer/sampling.py", "test_sampling.py test_llm.py",
          "self.seed + i", "self.seed"),
    Fault("request", "roseinfer/request.py", "test_scheduler.py",
          "/ (n - 1) if n > 1", "/ n if n > 1"),
    Fault("prompt logprobs", "layers/logprobs.py", "test_biased_sampling.py",
          "cls(sequence, start + 1,", "cls(sequence, start,"),
    Fault("log-probabilities", "roseinfer/outputs.py", "test_logprobs.py",
          "enumerate(most, 1)", "enumerate(most)"),
    Fault("likely tokens", "kernels/likely.py", "test_likely.py",
          "tl.where(rest < key, rest", "tl.where(rest <= key, rest"),
    Fault("bad words", "token_counts.py", "test_bad_words.py",
          "output = sequence.tokens[sequence.n_prompt : position]", "output = sequence.tokens[:position]"),
    Fault("trainer", "training.py", "test_train.py",
          "0.55 + 0.45 * math.cos", "0.45 + 0.55 * math.cos"),
    Fault("ranks", "watch.py", "test_ranks_end.py",
          "0 if moved else self._still[rank] + 1", "self._still[rank] + 1"),
    Fault("warm-up", "step.py", "test_warm_ups.py",
          "step.rehearsals(n_tokens) if rows is None", "step.rehearsals(n_tokens) if rows is not None"),
    Fault("compilers", "compile_ahead.py", "test_warm_ups.py",
          "if get_ident() == owner:", "if not get_ident():"),
    Fault("warm-up of rows", "worker.py", "test_warm_ups.py",
          "return steps + moves\n        return self.prompts.captures()",
          "pass\n        return self.prompts.captures()"),
    Fault("16-bit logits", "logprob_ring.py", "test_warm_ups.py",
          ".float(), self.state", ", self.state"),
    Fault("split q, k and v", "kernels/attention.py", "kernels/test_attention.py",
          "heads += more", "heads += more_swapped"),
    Fault("split bias", "kernels/linear.py", "test_linear.py",
          "tl.where(part == 0, N, 0)", "N"),
    Fault("one-stage ring", "ring.py", "test_ring.py",
          "max(2, (shared_bytes - held_bytes)", "max(1, (shared_bytes - held_bytes)"),
    Fault("keys in flight", "ring_attention.py", "layers/test_attention.py",
          "and block_size % BOX == 0", "and block_size > 0"),
    Fault("drafts' positions", "speculation.py", "test_speculation.py",
          "tl.where(is_there, position + i, -1)", "tl.where(is_there, position + i + 1, -1)"),
    Fault("a refused draft", "speculation.py", "test_speculation.py",
          "tl.min(tl.where(fails, i, N_DRAFTS + 1), axis=0)", "tl.sum(tl.where(fails, 0, 1), axis=0)"),
    Fault("counts of refused drafts", "penalties.py", "test_bad_words.py",
          "first + tl.load(fields + POSITION)", "first + PLACES + 0 * tl.load(fields + POSITION)"),
    Fault("a draft's own counts", "penalties.py", "test_bad_words.py",
          "fields, first, end = wide_ptr + target * wide_stride, target // PLACES * PLACES, target",
          "fields, first, end = wide_ptr + target * wide_stride, target // PLACES * PLACES, target - 1"),
    Fault("logprobs of drafts", "speculative.py", "steps/test_speculative.py",
          "after = 1 + self._wide", "after = 0 + self._wide"),
    Fault("logprobs after a stop string", "request.py", "roseinfer/test_speculation.py",
          "del self.logprobs[n_tokens - self.n_prompt :]", "pass"),
    Fault("a draft's stale key", "kernels/speculation.py", "test_speculation.py",
          "count = tl.where(position >= 0, 1 + n_drafts, 0)", "count = tl.where(position >= 0, 1, 0)"),
    Fault("texts of plain steps", "kernels/advance.py", "test_speculation.py",
          "tl.store(text + 1, tl.maximum(token, 0)", "tl.store(text + 1, tl.maximum(last, 0)"),
    Fault("drafts given back", "planner.py", "test_speculative.py",
          "+ given + pending.n_drafting * pending.drafts", "+ pending.n_drafting * pending.drafts"),
    Fault("steps left of drafts", "planner.py", "test_speculative.py",
          "self.left[at] - pending.n_steps - given, 0)", "self.left[at] - pending.n_steps, 0)"),
    Fault("a draft that is not finite", "prefill.py", "test_verify_attention.py",
          "k, v = _harmless(k, v)", "pass"),
    Fault("texts of moved rows", "speculative.py", "test_speculative.py",
          "in (self.texts.tokens, self._numbers)", "in (self._numbers,)"),
    Fault("drafts of an earlier batch", "planner.py", "test_speculative.py",
          "count_of.get(row, 0)", "count_of.get(row, 1)"),
    Fault("rounds of moved rows", "worker.py", "test_resident.py",
          "rows[:, ROUND + 1 :]", "rows[:, ROUND:]"),
    Fault("tokens of plain steps for the draft model", "speculative.py", "test_speculative.py",
          'self._call("catch_up", rows)', "pass"),
    Fault("what the draft model has cached", "speculative.py", "test_speculative.py",
          "0, state.positions, cached)", "0, state.positions - 1, cached)"),
    Fault("the last draft's keys", "draft_model.py", "test_speculative.py",
          "range(n_drafts + 1)", "range(n_drafts)"),
    Fault("blocks cloned for the draft model", "speculative.py", "test_speculative.py",
          "self.blocks.copy_everywhere = partial", "_ = partial"),
    Fault("texts sent late", "planner.py", "test_speculative.py",
          "if start or not most)", "if start and not most)"),
    Fault("drafts of a row with min_tokens", "planner.py", "test_speculative.py",
          "if start or not most)", "if start)"),
    Fault("slots of drafts", "planner.py", "test_speculative.py",
          "n_drafts).room <= n_drafts", "n_drafts).room <= 0"),
    Fault("two boxes", "ring_attention.py", "kernels/test_attention.py",
          "stages * tile < 2 * BOX", "stages * tile < BOX"),
    Fault("wide single row", "layers/attention.py", "layers/test_attention.py",
          "c.d_model <= NARROW and", "c.d_model >= 1 and"),
    Fault("tuner", "tuning.py", "test_tuning.py",
          "SHORTER * median", "median"),
    Fault("tuned ranges of K", "kernels/linear.py", "test_tuning.py",
          "tuned.parts == parts", "tuned.parts"),
    Fault("steps by rows", "bench/steps.py", "test_steps.py",
          "rows * context *", "context *"),
    Fault("largest captures", "worker.py", "test_trial.py",
          "self.logprobs.captures()[:1]", "self.logprobs.captures()[:2]"),
    Fault("largest prefill", "worker.py", "test_trial.py",
          "self.prompts.captures()[:1]", "self.prompts.captures()[:2]"),
    Fault("rows sent", "worker.py", "test_resident.py",
          "words.shape[1] - 1]", "words.shape[1] + 0]"),
    Fault("tied head", "models/model.py", "test_model.py",
          "len(self.words) < len(shared)", "len(self.words) > len(shared)"),
    Fault("chat", "models/chat.py", "test_chat.py",
          "prompt=add_generation_prompt", "prompt=True"),
)
# fmt: on

ROOMS = {  # each has a fault in it
    *(f"lab/{room}" for room in ("diagnose", "figures", "records", "running", "trying")),
    *("models", "models/families", "rosetrainer", "assets/pages"),
    *("roseinfer", *(f"roseinfer/{room}" for room in ("cache", "kernels", "layers", "ranks", "serving"))),
    *("roseinfer/steps", "bench", "cluster", "ladder"),
}


def found(folder: Path, names: str) -> list[Path]:
    """The files below the folder that have these names; KeyError for a name that none has."""
    paths = sorted(folder.rglob("*.*"))
    files = {name: [path for path in paths if path.as_posix().endswith(f"/{name}")] for name in names.split()}
    if missing := [name for name, own in files.items() if not own]:
        raise KeyError(f"no file is called {missing[0]}")
    return [path for own in files.values() for path in own]


def holders(fault: Fault, checkout: Path) -> list[Path]:
    """The files called ``fault.file`` that have the text to be changed: one, or the fault is stale."""
    rooms = checkout / "rosellm", checkout / "notebooks" / "exhibits"
    paths = [path for room in rooms for path in room.rglob(Path(fault.file).name)]
    named = [path for path in paths if path.as_posix().endswith(f"/{fault.file}")]
    return [path for path in named if fault.old in path.read_text("utf-8")]


def plant(fault: Fault, checkout: Path) -> None:
    (path,) = holders(fault, checkout)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


@contextmanager
def copy_of(checkout: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__")
        yield Path(shutil.copytree(checkout, Path(folder) / "copy", ignore=ignored))


def failures(checkout: Path, tests: str, *options: str) -> list[str]:
    """The tests that failed, or how pytest ended if it ran none."""
    paths = map(str, found(checkout / "tests", tests))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *paths]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return []
    told = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return told or [f"pytest ended with {done.returncode}: {done.stderr.strip()[-200:]}"]


def try_one(fault: Fault, checkout: Path) -> str:
    """What became of the fault: found by a test, missed, or stale."""
    with copy_of(checkout) as copy:
        if len(holders(fault, copy)) != 1:
            return "STALE"
        plant(fault, copy)
        failed = failures(copy, fault.tests, "-x")
        return f"found by {failed[0]}" if failed else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--workers", type=int, default=2, help="faults that are tried at a time")
    parser.add_argument("parts", nargs="*", help="parts to try, by a word of their names; all by default")
    arguments = parser.parse_args()
    words, checkout = arguments.parts, arguments.checkout.resolve()
    chosen = [fault for fault in FAULTS if not words or any(word in fault.part for word in words)]
    with copy_of(checkout) as copy:
        names = " ".join(dict.fromkeys(name for fault in chosen for name in fault.tests.split()))
        if failed := failures(copy, names, "-n", str(arguments.workers), "--dist", "loadfile"):
            print("these fail without a fault:", *failed, sep="\n")
            return 2
    with ThreadPoolExecutor(arguments.workers) as threads:
        tried = threads.map(lambda fault: try_one(fault, checkout), chosen)
        results = []
        for fault, result in zip(chosen, tried, strict=True):
            results.append(result)
            print(f"{fault.part:<18}{result}", flush=True)
    n_found = sum(result.startswith("found") for result in results)
    print(f"{n_found} of {len(chosen)} faults found")
    return 0 if n_found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
