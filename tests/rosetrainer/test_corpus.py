"""The training text: which files, in which order, on which side."""

from __future__ import annotations

from pathlib import Path

import pytest

from rosellm.errors import RoseError
from rosellm.rosetrainer.corpus import Source, is_validation, read_corpus

HELD_OUT = next(f"m{i}.py" for i in range(1000) if is_validation(f"m{i}.py"))
TRAINED_ON = [f"m{i}.py" for i in range(100) if not is_validation(f"m{i}.py")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file to train on and one held out."""
    write(tmp_path, TRAINED_ON[0], "a = 1\n")
    write(tmp_path, HELD_OUT, "b = 2\n")
    return tmp_path


def write(folder: Path, path: str, text: str | bytes) -> None:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(text.encode() if isinstance(text, str) else text)


def paths(sources: tuple[Source, ...]) -> list[str]:
    return [source.path for source in sources]


def test_the_split_depends_on_the_relative_path_alone(folder: Path) -> None:
    write(folder, TRAINED_ON[1], "c = 3\n")
    write(folder, HELD_OUT, "other = 'text'\n")
    corpus = read_corpus(folder)
    assert paths(corpus.validation) == [HELD_OUT]
    assert paths(corpus.train) == sorted(TRAINED_ON[:2])
    held_out = ["sched.py", "copyreg.py", "zoneinfo/__init__.py", "multiprocessing/connection.py"]
    trained_on = ["argparse.py", "json/decoder.py", "asyncio/tasks.py"]
    assert [path for path in held_out + trained_on if is_validation(path)] == held_out


@pytest.mark.parametrize(
    ("path", "content"),
    [
        *((path, b"secret = 1\n") for path in ("site-packages/a.py", "pkg/__pycache__/d.py", "notes.txt")),
        *((path, b"secret = 1\n") for path in ("encodings/cp037.py", "sitecustomize.py")),
        *((TRAINED_ON[1], content) for content in (b"", b" \n\n", b"name = '\xff\xfe'\n")),
    ],
    ids=str,
)
def test_files_that_are_not_the_librarys_code_or_no_text_are_left_out(folder: Path, path, content) -> None:
    before = read_corpus(folder)
    write(folder, path, content)
    assert read_corpus(folder) == before


def test_byte_order_marks_and_carriage_returns_do_not_reach_the_text(folder: Path) -> None:
    write(folder, TRAINED_ON[0], b"\xef\xbb\xbfa = 1\r\nb = 2\r\n")
    assert read_corpus(folder).train[0].text == "a = 1\nb = 2\n"


def test_of_equal_files_only_the_first_is_kept_whichever_side_it_is_on(folder: Path) -> None:
    before = read_corpus(folder)
    for side, text in ((True, "a = 1\n"), (False, "b = 2\n")):  # copies on the other side
        write(folder, next(f"z{i}.py" for i in range(1000) if is_validation(f"z{i}.py") == side), text)
    assert read_corpus(folder) == before


def test_a_corpus_needs_a_file_on_both_sides(tmp_path: Path) -> None:
    write(tmp_path, TRAINED_ON[0], "a = 1\n")
    with pytest.raises(RoseError, match="1 training and 0 validation files"):
        read_corpus(tmp_path)
