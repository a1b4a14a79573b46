"""Executed notebooks as HTML pages, and an index with a card for each; none needs a network."""

import base64
import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import nbformat
from jinja2 import Environment
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from plotly.offline import get_plotlyjs

import rosellm
from rosellm.atomic import write_text
from rosellm.lab.figures.charts import PLOTLY
from rosellm.lab.figures.widgets import FRAMES, WIDGET

RECORD = "gallery.json"
PAGES = Path(rosellm.__file__).parent / "assets" / "pages"
SHORT_PATH = ("00", "01", "03", "05", "13", "18", "20")


class Act(NamedTuple):
    """A part of the course: what it is about, and the numbers of its notebooks."""

    name: str
    about: str
    numbers: tuple[str, ...]


ACTS = (
    Act("The map", "Where a decode step's time goes, rung by rung.", ("00",)),
    Act(
        "Act I: feed the GPU",
        "At first it waits for Python most of the time; at the end it runs on its own.",
        ("01", "02", "03", "04", "05", "06", "07", "09", "10", "11", "12", "13"),
    ),
    Act(
        "Act II: give it less to do",
        "Fewer kernels, smaller ones, launched before their inputs are there.",
        ("14", "15", "16", "18", "19", "20", "21", "22"),
    ),
    Act("Modern models", "Qwen3 and Llama 3, long and unequal contexts.", ("26", "27", "28", "30")),
    Act(
        "Serving",
        "Determinism, failures, sampling, the first request, arrivals.",
        ("23", "24", "31", "32", "33", "34"),
    ),
    Act("More GPUs", "Sharing a model, replicas, planning.", ("35", "36", "37")),
    Act("Your turn", "Write a kernel; find out why your own loop is slow.", ("25", "29")),
)
YOURS = Act("Yours", "Notebooks of your own.", ())

OPTIONS = "{responsive: true, displayModeBar: false}"
SLIDER = Template(
    """<label>$label <input type="range" min="0" max="$last" value="$first" id="$name-slider"></label>
<output id="$name-value"></output><div class="figure"><div id="$name"></div></div><script>(() => {
const values = $values, figures = [$figures];
const slider = document.getElementById("$name-slider"), shown = document.getElementById("$name-value");
const draw = () => {
  shown.textContent = values[slider.value];
  return Plotly.react("$name", ...figures[slider.value], $options);
};
slider.addEventListener("input", draw);
draw()$links
})()</script>"""
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a notebook: ``status`` is "ok", "failed" or "timeout"; ``seconds`` is its run time.

    machine: the host that ran it, "" for this one.
    """

    name: str
    seconds: float
    status: str
    error: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    machine: str = ""


def place(outcome: Outcome) -> str:
    """`` on MACHINE``, or nothing for this one."""
    return f" on {outcome.machine}" if outcome.machine else ""


def outcomes_in(output: Path) -> dict[str, Outcome]:
    """Name → the last outcome of every notebook in the gallery at ``output``."""
    return {name: _outcome(card) for name, card in _cards(output).items()}


def publish_gallery(notebooks: dict[str, Path], outcomes: Sequence[Outcome], output: Path) -> None:
    """Writes the index of all notebooks run so far: the cards of these are renewed, the others kept.

    ``notebooks`` are the outcomes' files by name; ``output`` holds the executed ones and their pages.
    """
    cards = _cards(output) | {
        outcome.name: _card(notebooks[outcome.name], outcome, output) for outcome in outcomes
    }
    folder = next(iter(notebooks.values())).parent
    cards = {name: cards[name] for name in sorted(cards) if (folder / f"{name}.ipynb").exists()}
    write_text(output / "plotly.min.js", get_plotlyjs())
    write_text(output / RECORD, json.dumps(cards, indent=1))
    write_text(output / "index.html", _index(cards, output))


def page(notebook: NotebookNode, folder: Path) -> str:
    """A notebook as one HTML page; figures are drawn by the ``plotly.min.js`` beside it.

    ``folder`` is the notebook's, whose other notebooks the page links to.
    """
    shown = without_widgets(nbformat.from_dict(notebook))
    for number, output in enumerate(_outputs(shown)):
        data = output.get("data", {})
        if FRAMES in data:
            output["data"] = {"text/html": _slider(data[FRAMES], number)}
        elif PLOTLY in data:
            output["data"] = {"text/html": _plot(data[PLOTLY], number)}
    template = (PAGES / "page.html.j2").read_text(encoding="utf-8")
    exporter = HTMLExporter(raw_template=template, exclude_input_prompt=True, exclude_output_prompt=True)
    metadata = {"name": title(notebook) or "RoseLLM", "path": str(folder)}
    resources = {"metadata": metadata, "way": _neighbours(notebook, folder)}
    body, _ = exporter.from_notebook_node(shown, resources=resources)
    return _link_pages(_with_contents(body), {path.stem for path in folder.glob("*.ipynb")})


def _neighbours(notebook: NotebookNode, folder: Path) -> dict[str, tuple[str, str]]:
    """Name and title of the notebook before and the one after, in the order of their numbers."""
    titles = {path.stem: title(nbformat.read(path, 4)) for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    names, own = list(titles), title(notebook)
    here = [i for i, name in enumerate(names) if titles[name] == own]
    if not here:
        return {}
    near = {"before": here[0] - 1, "after": here[0] + 1}
    return {side: (names[i], titles[names[i]]) for side, i in near.items() if 0 <= i < len(names)}


def _with_contents(body: str) -> str:
    """A page with links to its sections."""
    sections = re.findall(r'<h2 id="([^"]+)">(.*?)<a class="anchor-link"', body)
    links = "".join(f'<a href="#{anchor}">{re.sub("<[^>]+>", "", name)}</a>' for anchor, name in sections)
    return body.replace("<!-- contents -->", f'<nav class="contents">{links}</nav>', 1)


def without_widgets(notebook: NotebookNode) -> NotebookNode:
    """The notebook, changed in place: no widget state, and no output that shows a widget."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    return notebook


def title(notebook: NotebookNode) -> str:
    """The first Markdown heading, without its markup; "" if there is none."""
    for cell in notebook.cells:
        heading = re.search(r"^#+\s+(.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and heading:
            return re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip()
    return ""


def question(notebook: NotebookNode) -> str:
    """The line in italics below the title; "" if there is none."""
    asked = re.search(r"^\*([^*\n]+)\*$", notebook.cells[0].source if notebook.cells else "", re.MULTILINE)
    return asked[1] if asked else ""


def reading_minutes(notebook: NotebookNode) -> int:
    """Minutes to read a notebook: 200 words of prose, or 20 lines of code, a minute."""
    prose = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    code = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    words = sum(len(source.split()) for source in prose)
    lines = sum(bool(line.strip()) for source in code for line in source.splitlines())
    return max(1, round(words / 200 + lines / 20))


def picture(notebook: NotebookNode, folder: Path) -> str:
    """The first PNG or SVG among the outputs, or else in the Markdown, as a data URI; "" if there is none."""
    for output in _outputs(notebook):
        for kind in ("image/png", "image/svg+xml"):
            if kind in output.get("data", {}):
                return _data_uri(kind, output["data"][kind])
    return next(_markdown_pictures(notebook, folder), "")


def _cards(output: Path) -> dict[str, dict[str, Any]]:
    record = output / RECORD
    return json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}


def _card(notebook: Path, outcome: Outcome, output: Path) -> dict[str, Any]:
    committed = nbformat.read(notebook, as_version=4)
    executed = output / notebook.name
    fresh = picture(nbformat.read(executed, as_version=4), notebook.parent) if executed.exists() else ""
    return asdict(outcome) | {
        "title": title(committed) or outcome.name,
        "question": question(committed),
        "minutes": reading_minutes(committed),
        "picture": picture(committed, notebook.parent) or fresh,
    }


def _outcome(card: dict[str, Any]) -> Outcome:
    return Outcome(**{one.name: card[one.name] for one in fields(Outcome) if one.name in card})


def _index(cards: dict[str, dict[str, Any]], output: Path) -> str:
    shown = [card | {"has_page": (output / f"{name}.html").exists()} for name, card in cards.items()]
    in_an_act = {number for act in ACTS for number in act.numbers}
    acts = []
    for act in (*ACTS, YOURS):
        own = [card for card in shown if _is_of(card["name"][:2], act, in_an_act)]
        if own:
            acts.append({"name": act.name, "about": act.about, "cards": own})
    start = [(card["name"], card["name"][:2]) for card in shown if card["name"][:2] in SHORT_PATH]
    template = Environment(autoescape=True).from_string((PAGES / "index.html.j2").read_text(encoding="utf-8"))
    failures = sum(card["status"] != "ok" for card in shown)
    return template.render(acts=acts, start=start, count=len(shown), failures=failures)


def _is_of(number: str, act: Act, in_an_act: set[str]) -> bool:
    return number in act.numbers or (act is YOURS and number not in in_an_act)


def _outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield from cell.outputs


def _plot(figure: dict[str, Any], number: int) -> str:
    name, arguments = f"figure-{number}", _arguments(figure)
    draw = f'Plotly.newPlot("{name}", {arguments}, {OPTIONS}){_links(arguments)}'
    return f'<div class="figure"><div id="{name}"></div></div><script>{draw}</script>'


def _slider(frames: dict[str, Any], number: int) -> str:
    """One figure of several, chosen by a slider."""
    figures = [_arguments(figure) for figure in frames["figures"]]
    return SLIDER.substitute(
        name=f"figure-{number}",
        label=html.escape(frames["label"]),
        last=len(figures) - 1,
        first=frames["first"],
        values=json.dumps(frames["values"]),
        figures=",\n".join(f"[{figure}]" for figure in figures),
        options=OPTIONS,
        links=_links("".join(figures)),
    )


def _arguments(figure: dict[str, Any]) -> str:
    """A figure's data and layout, as wide as the page, as JavaScript inside a page."""
    layout = {key: value for key, value in figure.get("layout", {}).items() if key != "width"}
    call = [json.dumps(one) for one in (figure.get("data", []), layout)]
    return ", ".join(call).replace("</", "<\\/")


def _links(figure: str) -> str:
    """Sets a figure's links after each drawing: plotly drops relative ones on a page opened from a file."""
    found = re.findall(r'<a href=\\"([^"\\]+)\\">([^<]+)<', figure)
    targets = {text: target for target, text in found}
    if not targets:
        return ""
    return f""".then(figure => {{
  const targets = {json.dumps(targets)};
  const link = () => figure.querySelectorAll("a").forEach(a => {{
    if (targets[a.textContent]) a.setAttribute("href", targets[a.textContent]);
    a.style.pointerEvents = "all";
  }});
  figure.on("plotly_afterplot", link);
  link();
}})"""


def _link_pages(body: str, names: set[str]) -> str:
    def to_page(match: re.Match[str]) -> str:
        return f"{match[1]}.html" if match[1] in names else match[0]

    return re.sub(r'(?<=")(?:\./)?([\w.-]+)\.ipynb(?=[\\"#?])', to_page, body)


def _markdown_pictures(notebook: NotebookNode, folder: Path) -> Iterator[str]:
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        for attached in cell.get("attachments", {}).values():
            yield from (_data_uri(kind, data) for kind, data in attached.items())
        for drawing in re.findall(r"<svg\b.*?</svg>", cell.source, re.DOTALL):
            yield _data_uri("image/svg+xml", drawing)
        for one, other in re.findall(r'!\[[^\]]*\]\(([^)\s]+)|<img[^>]*\bsrc="([^"]+)', cell.source):
            if Path(one or other).suffix in (".svg", ".png") and (folder / (one or other)).is_file():
                yield _file_uri(folder / (one or other))


def _file_uri(path: Path) -> str:
    kind = {".svg": "image/svg+xml", ".png": "image/png"}[path.suffix]
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _data_uri(kind: str, data: str) -> str:
    if kind == "image/svg+xml" and data.lstrip().startswith("<"):
        data = base64.b64encode(data.encode()).decode()
    return f"data:{kind};base64,{''.join(data.split())}"
