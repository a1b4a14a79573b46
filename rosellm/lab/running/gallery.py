"""Make the gallery: an index of all executed notebooks, with a card for each; needs no network."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import Environment
from plotly.offline import get_plotlyjs

from rosellm.atomic import write_text
from rosellm.lab.records.notebooks import ACTS, Act
from rosellm.lab.running.execution import Outcome
from rosellm.lab.running.page import PAGES, picture, question, reading_minutes, title

RECORD = "gallery.json"
SHORT_PATH = ("00", "01", "03", "05", "13", "18", "19")
YOURS = Act("Yours", "Notebooks of your own.", ())


def outcomes_in(output: Path) -> dict[str, Outcome]:
    """Return the last outcome of every notebook in the gallery at ``output``, by the notebook's name."""
    names = [one.name for one in fields(Outcome)]
    return {name: Outcome(**{key: card[key] for key in names}) for name, card in _cards(output).items()}


def publish_gallery(notebooks: dict[str, Path], outcomes: Sequence[Outcome], output: Path) -> None:
    """Replace the cards of the given outcomes in the gallery, and write its index.

    notebooks: path of each outcome's notebook, by name.
    output: folder of the gallery, which holds the executed notebooks and their pages.

    Also writes ``pages.js``, from which every page reads the titles of all pages.
    """
    cards = _cards(output) | {one.name: _card(notebooks[one.name], one, output) for one in outcomes}
    folder = next(iter(notebooks.values())).parent
    cards = {name: cards[name] for name in sorted(cards) if (folder / f"{name}.ipynb").exists()}
    titles = {name: card["title"] for name, card in cards.items() if (output / f"{name}.html").exists()}
    if not (output / "plotly.min.js").exists():
        write_text(output / "plotly.min.js", get_plotlyjs())
    write_text(output / RECORD, json.dumps(cards, indent=1))
    write_text(output / "pages.js", f"const PAGES = {json.dumps(titles, indent=1)};\n")
    write_text(output / "index.html", _index(cards, titles))


def _cards(output: Path) -> dict[str, dict[str, Any]]:
    record = output / RECORD
    return json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}


def _card(notebook: Path, outcome: Outcome, output: Path) -> dict[str, Any]:
    committed, executed = nbformat.read(notebook, as_version=4), output / notebook.name
    fresh = picture(nbformat.read(executed, as_version=4)) if executed.exists() else ""
    return asdict(outcome) | {
        "title": title(committed) or outcome.name,
        "question": question(committed),
        "minutes": reading_minutes(committed),
        "picture": picture(committed) or fresh,
    }


def _index(cards: dict[str, dict[str, Any]], pages: dict[str, str]) -> str:
    in_an_act = {number for act in ACTS for number in act.numbers}
    yours = YOURS._replace(numbers=tuple({name[:2] for name in cards} - in_an_act))
    acts = [
        act._asdict() | {"cards": [card for name, card in cards.items() if name[:2] in act.numbers]}
        for act in (*ACTS, yours)
    ]
    start = [name for name in pages if name[:2] in SHORT_PATH]
    template = Environment(autoescape=True).from_string((PAGES / "index.html.j2").read_text(encoding="utf-8"))
    is_whole = len(start) == len(SHORT_PATH)
    return template.render(acts=acts, cards=cards, pages=pages, start=start, is_whole=is_whole)
