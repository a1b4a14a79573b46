"""Write a working notebook: ``python -m rosellm.lab.running.new_notebook 50_my_idea``.

It compares the rung of that name with the previous one, or two default rungs if there is no such rung, and is
executed.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import rosellm
from rosellm.atomic import write_text
from rosellm.command_line import OneLineParser, command
from rosellm.lab.records.records import results_folder
from rosellm.lab.running.execution import NotebookError
from rosellm.lab.running.refresh_notebooks import refresh
from rosellm.roseinfer.recipe import BEFORE

DRAFT = Path(rosellm.__file__).parent / "assets" / "new_notebook.ipynb"
TO_BEGIN_WITH = "paged"
NAME = re.compile(r"(\d\d)_([a-z][a-z0-9_]*)")


def draft(name: str) -> str:
    """Return the JSON of a notebook that has not been executed. Raises NotebookError for an invalid name.

    name: two digits and a topic, such as "50_my_idea". If the topic is a rung, the notebook compares it.
    """
    found = NAME.fullmatch(name)
    if not found:
        raise NotebookError(
            f"name is {name!r}; give two digits and a topic: make new-notebook NAME=50_my_idea"
        )
    number, topic = found.groups()
    text = DRAFT.read_text(encoding="utf-8").replace("NUMBER", number).replace("TOPIC", topic)
    return text.replace("RUNG", topic if topic in BEFORE else TO_BEGIN_WITH)


def write(name: str, folder: Path) -> Path:
    """Execute the draft ``name`` in ``folder``, save it there, and return its path.

    Raises NotebookError for an invalid name, for a number that another notebook has, or if execution fails;
    nothing is then saved.
    """
    text, path = draft(name), folder / f"{name}.ipynb"
    taken = next(folder.glob(f"{name[:2]}_*.ipynb"), None)
    if taken:
        raise NotebookError(f"number {name[:2]} is taken by {taken.stem}")
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, path.name)
        made.write_text(text, encoding="utf-8")
        refresh([made], None, folder=folder)
        write_text(path, made.read_text(encoding="utf-8"))
    return path


@command
def main(argv: list[str] | None = None) -> None:
    """Write the notebook."""
    parser = OneLineParser(prog="python -m rosellm.lab.running.new_notebook", description=__doc__)
    parser.add_argument(
        "name", nargs="?", default="", help="two digits and a topic or a rung, like 50_my_idea"
    )
    path = write(parser.parse_args(argv).name, results_folder().parent)
    print(f"notebooks/{path.name} written and executed")


if __name__ == "__main__":
    raise SystemExit(main())
