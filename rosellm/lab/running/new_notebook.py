"""Writes a notebook that works: ``python -m rosellm.lab.running.new_notebook 27_my_idea``.

It compares the rung of that name with the one below it, or two others to begin with, has been executed, and
stands in README.md's index.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from rosellm.atomic import write_text
from rosellm.command_line import OneLineParser, command
from rosellm.lab.running import readme
from rosellm.lab.running.refresh_notebooks import execute, normalise
from rosellm.lab.running.run_notebooks import NotebookError, kernel_environment
from rosellm.roseinfer.recipe import BEFORE

TO_BEGIN_WITH = "paged"
NAME = re.compile(r"(\d\d)_([a-z][a-z0-9_]*)")
TIMEOUT_S = 300.0

IMPORTS = """import rosellm  # first: it settles how Triton runs here
from rosellm.lab.figures.charts import show
from rosellm.lab.figures.compare import live_chart, recorded_chart, say_verdict
from rosellm.lab.figures.widgets import Control, explore
from rosellm.lab.records.bench import compare, get_model, make_prompts
from rosellm.lab.records.parameters import check_parameters
from rosellm.lab.records.records import find
from rosellm.roseinfer.recipe import LADDER"""
PARAMETERS = """model: str = "rose-tiny"  # or a folder, or gpt2 with dummy weights
load_format: str = "auto"
device: str = "auto"
dtype: str = "auto"
batch: int = 4  # sequences that decode together
prompt_lengths: list[int] = [2, 40]  # tokens, taken in turn
new_tokens: int = 16  # a sequence"""
START = """gpt = get_model(model, device, dtype, load_format)
check_parameters(gpt, batch=batch, prompt_lengths=prompt_lengths, new_tokens=new_tokens)
prompts = make_prompts(batch, prompt_lengths, gpt.config.vocab_size)
results = find("nvidia-h200")
before, after = {before!r}, {after!r}
LADDER[before].difference(LADDER[after])"""
EQUAL = """exact = get_model(model, device, "float32", load_format)
old, new = compare(exact, before, after, prompts, max(new_tokens, 6))
print(f"{batch} prompts, fp32, tokens equal: {old.tokens == new.tokens}")"""
HERE = """old, new = compare(gpt, before, after, prompts, max(new_tokens, 6))
show(live_chart(old, new, f"{before} → {after} on this {gpt.device.type}"))"""
RECORDED = """show(recorded_chart(results, before, after))
say_verdict(results, before, after)"""


def draft(name: str) -> NotebookNode:
    """The notebook ``NN_topic``, not yet executed. Raises NotebookError for another kind of name."""
    found = NAME.fullmatch(name)
    if not found:
        raise NotebookError(f"name is {name!r}; give two digits and a topic, like 27_my_idea")
    number, topic = found.groups()
    after = topic if topic in BEFORE else TO_BEGIN_WITH
    cells = [
        new_markdown_cell(f"# {number} · What does `{topic}` change?\n\nWhat was slow, and what is changed."),
        new_code_cell(IMPORTS),
        new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        new_code_cell(START.format(before=BEFORE[after], after=after)),
        new_markdown_cell("## The same tokens"),
        new_code_cell(EQUAL),
        new_markdown_cell("## Here"),
        new_code_cell(HERE, metadata={"tags": ["nbval-ignore-output"]}),
        new_markdown_cell("## On the recorded GPU"),
        new_code_cell(RECORDED),
        new_markdown_cell("## Summary\nWhat came out, and what surprised."),
    ]
    return new_notebook(cells=cells)


def write(name: str, folder: Path) -> Path:
    """Execute the draft in ``folder`` and keep it there. Raises NotebookError if its number is taken."""
    notebook, path = draft(name), folder / f"{name}.ipynb"
    taken = next(folder.glob(f"{name[:2]}_*.ipynb"), None)
    if taken:
        raise NotebookError(f"number {name[:2]} is taken by {taken.stem}")
    with tempfile.TemporaryDirectory() as kernels:
        os.environ.update(kernel_environment(Path(kernels)) | {"TORCH_CPP_LOG_LEVEL": "ERROR"})
        made = normalise(execute(notebook, name, folder, TIMEOUT_S))
    write_text(path, nbformat.writes(made) + "\n")
    return path


@command
def main(argv: list[str] | None = None) -> None:
    """Write the notebook, then renew README.md."""
    parser = OneLineParser(prog="python -m rosellm.lab.running.new_notebook", description=__doc__)
    parser.add_argument("name", help="two digits and a topic or a rung, like 27_my_idea")
    path = write(parser.parse_args(argv).name, readme.ROOT / "notebooks")
    print(f"{path.relative_to(readme.ROOT)} written and executed")
    readme.main([])


if __name__ == "__main__":
    raise SystemExit(main())
