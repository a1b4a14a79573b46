"""The command that makes the shipped model, and what it is made of."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rosellm.errors import RoseError
from rosellm.models.arch import Arch
from rosellm.models.checkpoint import SHIPPED, SHIPPED_DRAFTS, SHIPPED_MODELS, checkpoint_folder, load_config
from rosellm.models.model import Transformer
from rosellm.models.tokenizer import load_tokenizer
from rosellm.models.weights import load_model
from rosellm.rosetrainer import train as command, training
from rosellm.rosetrainer.bpe import train_tokenizer
from rosellm.rosetrainer.corpus import Corpus, Source, read_corpus
from rosellm.rosetrainer.train import replacing_folder
from rosellm.rosetrainer.training import (
    Hyperparameters,
    agreement,
    mean_loss,
    token_stream,
    train,
    window_loss,
)
from tests.helpers import CPU, FAMILIES, random_model, small_config, uncached_logits

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(80))
SOURCES = Corpus(
    (Source("a.py", TEXT), Source("b.py", TEXT.replace("x", "y"))), (Source("c.py", TEXT[:500]),)
)
QUICK = Hyperparameters(
    epochs=1, batch_size=4, learning_rate=1e-2, warmup_steps=2, dropout=0.1, validate_every=5
)
TINY = Arch(vocab_size=300, n_positions=16, n_layers=1, n_heads=2, d_model=16, eos_token_ids=(0,))


def run_smoke(folder: Path, device: str, *others: str) -> tuple[Path, dict]:
    """The checkpoint and the record that the command makes in a process of its own."""
    output, record = folder / "new" / "rose", folder / "record.json"
    command = [sys.executable, "-m", "rosellm.rosetrainer.train", "--smoke", "--device", device]
    options = ["--output", str(output), "--json", str(record)]
    done = subprocess.run([*command, *options, *others], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return output, json.loads(record.read_text())


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    return run_smoke(tmp_path_factory.mktemp("smoke"), "cpu")


def tiny_model() -> Transformer:
    return Transformer(small_config(n_layers=1, n_positions=16)).initialise(0)


def tiny_stream(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(101, (n,), generator=torch.Generator().manual_seed(seed))


def naive_loss(gpt: Transformer, ids: list[int]) -> float:
    """Each token from its predecessors in its window, one window after the other."""
    length, nats = gpt.config.n_positions, 0.0
    for start in range(0, len(ids) - 1, length):
        window = ids[start : start + length + 1]
        logits = uncached_logits(gpt, window[:-1])
        nats += F.cross_entropy(logits.double(), torch.tensor(window[1:]), reduction="sum").item()
    return nats / (len(ids) - 1)


# The command


def assert_learned(record: dict) -> None:
    first, last = record["curve"][0], record["curve"][-1]
    assert all(last[loss] < first[loss] - 0.8 for loss in ("train_loss", "validation_loss"))


@pytest.mark.slow
def test_the_command_writes_a_checkpoint_of_the_best_weights_and_nothing_else(smoke) -> None:
    folder, record = smoke
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert [path.name for path in folder.parent.iterdir()] == ["rose"]
    assert_learned(record)
    best = min(record["curve"], key=lambda point: point["validation_loss"])
    assert record["best_step"] == best["step"]
    assert record["validation"]["nats_per_token"] == pytest.approx(best["validation_loss"], abs=2e-3)


@pytest.mark.slow
def test_the_recorded_validation_is_that_of_the_stored_weights_over_the_exact_text(smoke) -> None:
    folder, record = smoke
    held_out = read_corpus().subset(command.SMOKE_BYTES).validation
    gpt = load_model(str(folder), CPU, torch.float32)
    stream = token_stream(held_out, load_tokenizer(folder, gpt.config), CPU)
    n_tokens, n_bytes = len(stream) - 1, sum(len(source.text.encode()) for source in held_out)
    loss = mean_loss(gpt, stream, 16)
    assert record["validation"] == {
        "n_bytes": n_bytes,
        "n_tokens": n_tokens,
        "nats_per_token": pytest.approx(loss, abs=1e-5),
        "perplexity": pytest.approx(math.exp(loss), rel=1e-5),
        "bits_per_byte": pytest.approx(loss * n_tokens / math.log(2) / n_bytes, rel=1e-5),
    }


@pytest.mark.gpu
def test_the_command_trains_on_a_gpu(tmp_path: Path) -> None:
    record = run_smoke(tmp_path, "cuda")[1]
    assert_learned(record)
    assert record["environment"]["device"] == torch.cuda.get_device_name()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--corpus absent", "corpus 'absent' is not a folder"),
        ("--json absent/record.json", "record 'absent/record.json' is not a file name"),
        ("--json full", "record 'full' is not a file name"),
        ("--output full", "output 'full' holds 'thesis.txt'"),
        ("--output full/thesis.txt/rose", "output 'full/thesis.txt/rose' cannot be written"),
        ("--epochs 0", "epochs is 0.0; it must be positive and finite"),
        ("--epochs 1e308", "epochs is 1e+308; it must be at most 1000000"),
        ("--warmup-steps -1", "warmup_steps is -1; it must be zero or positive"),
        ("--dropout 1", "dropout is 1.0; it must be at least 0 and below 1"),
        ("--draft-of absent", "draft-of 'absent' is neither a folder nor one of rose-tiny, rose-tiny-qwen3"),
        ("--draft-of full/thesis.txt", "draft-of 'full/thesis.txt' is neither a folder nor"),
        ("--draft-of full", "full has no config.json"),
        ("--draft-of rose-tiny --arch qwen3", "draft-of 'rose-tiny' is a gpt2 model, which contradicts"),
        ("--draft-of rose-tiny --output full", "output 'full' holds 'thesis.txt'"),
    ],
)
def test_bad_input_is_one_line_status_2_and_changes_nothing(
    arguments, message, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **_named: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "read_corpus", lambda path: SOURCES if path is None else read_corpus(path))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    assert command.main(["--smoke", "--device", "cpu", *arguments.split()]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}") and printed.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "full", tmp_path / "full" / "thesis.txt"]


def test_a_corpus_too_small_for_the_vocabulary_is_refused(tmp_path: Path) -> None:
    config = replace(TINY, vocab_size=4096)
    with pytest.raises(RoseError, match=r"the corpus yields \d+ tokens; the model's vocabulary is 4096"):
        command.make_model(config, QUICK, SOURCES, CPU, tmp_path)


# Draft models


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A checkpoint of a model of 16 positions, which has seen few tokens."""
    folder = tmp_path / "rose"
    folder.mkdir()
    command.make_model(TINY, QUICK, SOURCES, CPU, folder)
    return folder


def refusal(capsys, *arguments: str) -> str:
    assert command.main(["--smoke", "--device", "cpu", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("model", SHIPPED_MODELS)
def test_the_command_makes_a_draft_that_shares_the_tokenizer_and_learns_to_agree(model, tmp_path) -> None:
    folder, record = run_smoke(tmp_path, "cpu", "--draft-of", model, "--epochs", "0.6")
    whole = checkpoint_folder(model)
    assert {path.name for path in folder.iterdir()} == command.OUTPUT_FILES
    for name in command.TOKENIZER_FILES:
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert_learned(record)
    draft, theirs = load_config(folder), load_config(whole)
    assert (draft.family, draft.vocab_size) == (theirs.family, theirs.vocab_size)
    assert record["draft_of"] == model and record["agreement"] > 0.03
    assert "agreement" not in record["validation"]


def test_a_draft_of_a_folder_is_written_beside_it_and_its_agreement_is_that_of_the_stored_weights(
    target: Path, monkeypatch
) -> None:
    monkeypatch.chdir(target.parent)
    Path("build").mkdir()
    monkeypatch.setattr(command, "read_corpus", lambda _: SOURCES)
    arguments = "--smoke --device cpu --draft-of rose --batch-size 4 --json build/record.json"
    assert command.main(arguments.split()) == 0
    record = json.loads(Path("build/record.json").read_text())
    draft, gpt = (load_model(folder, CPU, torch.float32) for folder in ("build/rose-draft", "rose"))
    assert (draft.config.n_positions, draft.config.vocab_size) == (16, 300)
    stream = token_stream(SOURCES.validation, load_tokenizer(target, gpt.config), CPU)
    assert record["draft_of"] == "rose"
    assert record["agreement"] == pytest.approx(agreement(draft, gpt, stream, 4))


def test_a_target_is_never_overwritten_by_its_draft(target: Path, capsys) -> None:
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    told = refusal(capsys, "--draft-of", str(target), "--output", str(target))
    assert "is the checkpoint of --draft-of; use another folder" in told
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "rose has no config.json"),
        ("model.safetensors", "safetensors"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("tokenizer_config.json", "has no tokenizer_config.json"),
    ],
)
def test_a_target_that_lacks_a_file_is_refused(file: str, message: str, target: Path, capsys) -> None:
    (target / file).unlink()
    output = target.parent / "draft"
    assert message in refusal(capsys, "--draft-of", str(target), "--output", str(output))
    assert not output.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(TINY, vocab_size=256), "has a tokenizer of 300 tokens; its model's vocabulary is 256"),
        (
            small_config(**FAMILIES["llama"], family="llama"),
            "is a llama model; draft models are gpt2 or qwen3",
        ),
    ],
    ids=["vocabulary", "family"],
)
def test_a_target_that_no_draft_fits_is_refused(config: Arch, message: str, target: Path, capsys) -> None:
    command.save_model(Transformer(config).initialise(0), target)
    assert message in refusal(capsys, "--draft-of", str(target), "--output", str(target.parent / "draft"))


@pytest.mark.parametrize("model", SHIPPED_MODELS)
def test_a_draft_fits_its_target_and_takes_at_most_3_mb(model: str) -> None:
    theirs = load_config(checkpoint_folder(model))
    draft = command.draft_arch(theirs, smoke=False)
    for field in ("family", "vocab_size", "n_positions", "eos_token_ids", "norm", "rope", "mlp", "biases"):
        assert getattr(draft, field) == getattr(theirs, field)
    assert draft.head_dim in (32, 64) and draft.n_layers == 2
    assert draft.n_kv_heads < draft.n_heads or theirs.n_kv_heads == theirs.n_heads
    assert 2 * draft.n_parameters < 2_900_000


@pytest.mark.parametrize("model", SHIPPED_DRAFTS)
def test_a_shipped_draft_is_found_by_name_beside_its_target(model: str) -> None:
    whole = checkpoint_folder(model.removesuffix("-draft"))
    assert checkpoint_folder(model) == whole.with_name(model)


def test_a_draft_is_trained_on_its_teachers_probabilities() -> None:
    gpt, teacher = random_model(0), random_model(1)
    gpt.requires_grad_(True)
    windows = tiny_stream(3 * 17).view(3, 17)
    loss = window_loss(gpt, windows, teacher)
    loss.backward()
    rows = [(uncached_logits(gpt, row[:-1]), uncached_logits(teacher, row[:-1])) for row in windows.tolist()]
    nats = [-(theirs.softmax(-1) * ours.log_softmax(-1)).sum(-1).mean() for ours, theirs in rows]
    assert loss.item() == pytest.approx(torch.stack(nats).mean().item(), rel=1e-5)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_distillation_brings_a_draft_nearer_to_its_teacher_than_the_text_does() -> None:
    teacher, stream = random_model(1, small_config(n_positions=16)), tiny_stream(2000)
    shares = []
    for used in (None, teacher):
        gpt = tiny_model()
        train(gpt, stream, tiny_stream(40, 1), replace(QUICK, dropout=0.0, validate_every=1000), used)
        shares.append(agreement(gpt, teacher, stream, 4))
    assert shares[1] > 2 * shares[0]


@pytest.mark.parametrize("n", [2, 17, 33, 70])
def test_agreement_counts_every_token_but_the_first_once(n: int) -> None:
    gpt, teacher = (random_model(seed, small_config(n_positions=16), std=0.02) for seed in (0, 1))
    ids = tiny_stream(n).tolist()
    pieces = [ids[start : start + 16] for start in range(0, n - 1, 16)]
    pieces[-1] = pieces[-1][: n - 1 - 16 * (len(pieces) - 1)]
    equal = sum(
        int((uncached_logits(gpt, piece).argmax(-1) == uncached_logits(teacher, piece).argmax(-1)).sum())
        for piece in pieces
    )
    assert agreement(gpt, teacher, tiny_stream(n), 2) == pytest.approx(equal / (n - 1))
    assert agreement(gpt, gpt, tiny_stream(n), 2) == 1


# Replacing a folder


FILES = ("config.json", "tokenizer.json")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of two files."""
    target = tmp_path / "rose"
    target.mkdir()
    for name in FILES:
        (target / name).write_text("old")
    return target


@pytest.mark.parametrize("is_link", [False, True])
def test_a_checkpoint_is_replaced_whole_or_not_at_all_and_a_link_to_it_stays_one(
    is_link, old: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(old)
    target = link if is_link else old
    with pytest.raises(KeyboardInterrupt), replacing_folder(target) as folder:
        (folder / "config.json").write_text("new")
        raise KeyboardInterrupt
    assert {path.name: path.read_text() for path in old.iterdir()} == dict.fromkeys(FILES, "old")
    with replacing_folder(target) as folder:
        (folder / "config.json").write_text("new")
        assert (old / "config.json").read_text() == "old"
    assert [(path.name, path.read_text()) for path in old.iterdir()] == [("config.json", "new")]
    assert link.is_symlink() and sorted(path.name for path in tmp_path.iterdir()) == ["link", "rose"]


# Training


@pytest.mark.parametrize("n", [2, 10, 16, 17, 18, 33, 70])
def test_the_mean_loss_predicts_every_token_but_the_first_once(n: int) -> None:
    gpt = random_model(0, small_config(n_positions=16))
    stream = tiny_stream(n)
    assert mean_loss(gpt, stream, batch_size=2) == pytest.approx(naive_loss(gpt, stream.tolist()), rel=1e-5)


def test_the_stream_starts_with_end_of_text_and_ends_every_file_with_it() -> None:
    tokenizer = train_tokenizer([TEXT], 300)
    first, second = (tokenizer.encode(source.text) for source in SOURCES.train)
    assert token_stream(SOURCES.train, tokenizer, CPU).tolist() == [0, *first, 0, *second, 0]


def test_equal_seeds_give_equal_files_and_another_seed_does_not(tmp_path: Path) -> None:
    written = []
    for run, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(run)
        folder.mkdir()
        command.make_model(TINY, replace(QUICK, epochs=0.1, seed=seed), SOURCES, CPU, folder)
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1]
    assert written[0]["model.safetensors"] != written[2]["model.safetensors"]
    assert written[0]["tokenizer.json"] == written[2]["tokenizer.json"]


def test_training_leaves_the_weights_of_the_best_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([3.0, 1.0, 2.0, 2.5])
    seen = []

    def scripted_loss(gpt: Transformer, *_: object) -> float:
        seen.append(gpt.blocks[0].up.weight.detach().clone())
        return next(scores)

    monkeypatch.setattr(training, "mean_loss", scripted_loss)
    gpt = tiny_model()
    done = train(gpt, tiny_stream(16 * 4 * 4), tiny_stream(40), replace(QUICK, validate_every=1))
    assert [point["validation_loss"] for point in done.curve] == [3.0, 1.0, 2.0, 2.5]
    assert done.best_step == 2
    assert torch.equal(gpt.blocks[0].up.weight, seen[1])
    assert not torch.equal(seen[1], seen[3])


def test_a_diverged_training_is_told_with_its_step() -> None:
    gpt = tiny_model()
    with torch.no_grad():
        gpt.norm.weight.fill_(math.nan)
    with pytest.raises(RoseError, match="the loss is not finite at step 1; lower the learning rate 0.01"):
        train(gpt, tiny_stream(200), tiny_stream(40), QUICK)


def test_the_learning_rate_warms_up_peaks_and_falls_to_a_tenth() -> None:
    hyper = replace(QUICK, learning_rate=1.0, warmup_steps=10)
    rates = [hyper.rate(step, 110) for step in range(111)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == max(rates) == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)


# The shipped checkpoint


@pytest.mark.slow
def test_the_shipped_model_knows_python_it_was_not_trained_on() -> None:
    folder = checkpoint_folder(SHIPPED)
    gpt = load_model(SHIPPED, CPU, torch.float32)
    held_out = tuple(source for source in read_corpus().validation if "test" not in source.path)
    stream = token_stream(held_out, load_tokenizer(folder, gpt.config), CPU)
    assert mean_loss(gpt, stream[:8193], batch_size=4) < 3.0
