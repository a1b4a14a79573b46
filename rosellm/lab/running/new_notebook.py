"""Write a working notebook: ``python -m rosellm.lab.running.new_notebook 40_my_idea``.

It compares the rung of that name with the previous one, or two default rungs if there is no such rung, and is
executed.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from rosellm.atomic import write_text
from rosellm.command_line import OneLineParser, command
from rosellm.lab.records.records import results_folder
from rosellm.lab.running.notebook_workers import NotebookError, kernel_environment
from rosellm.lab.running.refresh_notebooks import execute, normalise
from rosellm.roseinfer.recipe import BEFORE

TO_BEGIN_WITH = "paged"
NAME = re.compile(r"(\d\d)_([a-z][a-z0-9_]*)")
TIMEOUT_S = 300.0

CARD = """# {number} · {topic}

*What does `{topic}` change?*

| | |
|---|---|
| **Change** | the recipe's field, before → after |
| **Invariant** | the same tokens |
| **Hypothesis** | what should become faster, by how much, and why |
| **Wins** | where |
| **Loses** | where |
| **Superseded by** | – |"""
IMPORTS = "from rosellm.lab.rung import exercise, open_rung"
PARAMETERS = """model: str = "rose-tiny"  # or rose-tiny-qwen3, a folder, a hub id
load_format: str = "auto"
device: str = "auto"
dtype: str = "auto"
batch: int = 4  # sequences that decode together
prompt_lengths: list[int] = [2, 40]  # tokens, taken in turn
new_tokens: int = 16  # a sequence
record: str = "nvidia-h200"  # and machines to show beside it, such as "here\""""
START = """loading = {{"model": model, "load_format": load_format, "device": device, "dtype": dtype}}
sizes = {{"batch": batch, "prompt_lengths": prompt_lengths, "new_tokens": new_tokens}}
nb = open_rung("{after}", **loading, **sizes, record=record)
nb.change"""
STUB = """def twice(n):
    \"\"\"Your exercise.\"\"\"
    ...


exercise(twice, lambda f: f(3) == 6)"""
SOLUTION = """<details><summary>Solution</summary>

```python
def twice(n):
    return 2 * n
```
</details>"""


def folded(*tags: str) -> dict[str, Any]:
    """Return metadata of a cell whose source is folded in pages and in JupyterLab."""
    return {"jupyter": {"source_hidden": True}, "tags": sorted({"hide-input", *tags})}


def draft(name: str) -> NotebookNode:
    """Return the notebook ``NN_topic``, not yet executed. Raises NotebookError for an invalid name."""
    found = NAME.fullmatch(name)
    if not found:
        raise NotebookError(
            f"name is {name!r}; give two digits and a topic: make new-notebook NAME=40_my_idea"
        )
    number, topic = found.groups()
    after = topic if topic in BEFORE else TO_BEGIN_WITH
    cells = [
        new_markdown_cell(CARD.format(number=number, topic=topic)),
        new_code_cell(IMPORTS, metadata=folded()),
        new_code_cell(PARAMETERS, metadata=folded("parameters")),
        new_code_cell(START.format(after=after), metadata=folded()),
        new_markdown_cell("## Here"),
        new_code_cell("nb.compare()", metadata=folded("nbval-ignore-output")),
        new_code_cell("nb.tokens_equal()", metadata=folded()),
        new_markdown_cell("## The recorded GPU"),
        new_code_cell("nb.recorded()\nnb.verdict()", metadata=folded()),
        new_markdown_cell("## Exercise"),
        new_code_cell(STUB, metadata={"tags": ["exercise"]}),
        new_markdown_cell(SOLUTION),
    ]
    return new_notebook(cells=cells)


def write(name: str, folder: Path) -> Path:
    """Execute the draft in ``folder`` and save it there. Raises NotebookError if its number is taken."""
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
    """Write the notebook."""
    parser = OneLineParser(prog="python -m rosellm.lab.running.new_notebook", description=__doc__)
    parser.add_argument(
        "name", nargs="?", default="", help="two digits and a topic or a rung, like 40_my_idea"
    )
    path = write(parser.parse_args(argv).name, results_folder().parent)
    print(f"notebooks/{path.name} written and executed")


if __name__ == "__main__":
    raise SystemExit(main())
