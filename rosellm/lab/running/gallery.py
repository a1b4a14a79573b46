"""Render executed notebooks as HTML pages, and an index with a card for each; none needs a network."""

import base64
import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any

import nbformat
from jinja2 import Environment
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from plotly.offline import get_plotlyjs

import rosellm
from rosellm.atomic import write_text
from rosellm.lab.figures.charts import PLOTLY
from rosellm.lab.figures.widgets import FRAMES, WIDGET, merged
from rosellm.lab.records.notebooks import ACTS, Act

RECORD = "gallery.json"
PAGES = Path(rosellm.__file__).parent / "assets" / "pages"
SHORT_PATH = ("00", "01", "03", "05", "13", "18", "20")


YOURS = Act("Yours", "Notebooks of your own.", ())

WAY = re.compile(r'<nav class="way">.*?</nav>', re.DOTALL)
LINK = re.compile(r'<a (?:href|data-to)="([\w.-]+)\.html')  # to a notebook's page, whether or not it exists
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
    """Return `` on MACHINE``, or "" for this one."""
    return f" on {outcome.machine}" if outcome.machine else ""


def outcomes_in(output: Path) -> dict[str, Outcome]:
    """Return name → the last outcome of every notebook in the gallery at ``output``."""
    return {name: _outcome(card) for name, card in _cards(output).items()}


def publish_gallery(notebooks: dict[str, Path], outcomes: Sequence[Outcome], output: Path) -> None:
    """Write the index of all notebooks run so far; these outcomes' cards are replaced, the others kept.

    ``notebooks`` are the outcomes' files by name; ``output`` holds the executed ones and their pages.
    """
    cards = _cards(output) | {
        outcome.name: _card(notebooks[outcome.name], outcome, output) for outcome in outcomes
    }
    folder = next(iter(notebooks.values())).parent
    cards = {name: cards[name] for name in sorted(cards) if (folder / f"{name}.ipynb").exists()}
    write_text(output / "plotly.min.js", get_plotlyjs())
    write_text(output / RECORD, json.dumps(cards, indent=1))
    _link_pages({name: card["title"] for name, card in cards.items()}, output)
    write_text(output / "index.html", _index(cards, output))


def page(notebook: NotebookNode, folder: Path) -> str:
    """Render a notebook as one HTML page; figures are drawn by ``plotly.min.js`` in the same folder.

    Links to other notebooks of ``folder`` lead to their pages; :func:`publish_gallery` adds those to the
    neighbours.
    """
    shown = without_widgets(nbformat.from_dict(notebook))
    for number, output in enumerate(_outputs(shown)):
        data = output.get("data", {})
        if FRAMES in data:
            output["data"] = {"text/html": _slider(data[FRAMES], data[PLOTLY], number)}
        elif PLOTLY in data:
            output["data"] = {"text/html": _plot(data[PLOTLY], number)}
    template = (PAGES / "page.html.j2").read_text(encoding="utf-8")
    exporter = HTMLExporter(raw_template=template, exclude_input_prompt=True, exclude_output_prompt=True)
    metadata = {"name": title(notebook) or "RoseLLM", "path": str(folder)}
    body, _ = exporter.from_notebook_node(shown, resources={"metadata": metadata})
    return _to_pages(_with_contents(body), {path.stem for path in folder.glob("*.ipynb")})


def _link_pages(titles: dict[str, str], output: Path) -> None:
    """Link each page to its neighbours, and disable links to pages that do not exist."""
    pages = [name for name in titles if (output / f"{name}.html").exists()]
    there = {*pages, "index"}
    for i, name in enumerate(pages):
        path = output / f"{name}.html"
        text = path.read_text(encoding="utf-8")
        way = _way(pages[max(0, i - 1) : i], pages[i + 1 : i + 2], titles)
        linked = LINK.sub(
            lambda link: f'<a {"href" if link[1] in there else "data-to"}="{link[1]}.html', text
        )
        linked = WAY.sub(way.replace("\\", r"\\"), linked)
        if linked != text:
            write_text(path, linked)


def _way(before: list[str], after: list[str], titles: dict[str, str]) -> str:
    """Return links to the previous page if any, the index, and the next page if any."""
    back = [f'<a href="{name}.html">← {html.escape(titles[name])}</a>' for name in before]
    on = [f'<a href="{name}.html">{html.escape(titles[name])} →</a>' for name in after]
    ends = [f"<span>{''.join(links)}</span>" for links in (back, on)]
    return f'<nav class="way">{ends[0]}<a href="index.html">All notebooks</a>{ends[1]}</nav>'


def _with_contents(body: str) -> str:
    """Add links to a page's sections, if it has any."""
    sections = re.findall(r'<h2 id="([^"]+)">(.*?)<a class="anchor-link"', body)
    links = "".join(f'<a href="#{anchor}">{re.sub("<[^>]+>", "", name)}</a>' for anchor, name in sections)
    return body.replace("<!-- contents -->", f'<nav class="contents">{links}</nav>' if links else "", 1)


def without_widgets(notebook: NotebookNode) -> NotebookNode:
    """Remove widget state, and outputs that show a widget, in place; return the notebook."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    return notebook


def title(notebook: NotebookNode) -> str:
    """Return the first Markdown heading, without its markup; "" if there is none."""
    for cell in notebook.cells:
        heading = re.search(r"^#+\s+(.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and heading:
            return re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip()
    return ""


def question(notebook: NotebookNode) -> str:
    """Return the line in italics below the title; "" if there is none."""
    asked = re.search(r"^\*([^*\n]+)\*$", notebook.cells[0].source if notebook.cells else "", re.MULTILINE)
    return asked[1] if asked else ""


def reading_minutes(notebook: NotebookNode) -> int:
    """Estimate minutes to read a notebook: 200 words of prose, or 20 lines of code, per minute."""
    prose = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    code = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    words = sum(len(source.split()) for source in prose)
    lines = sum(bool(line.strip()) for source in code for line in source.splitlines())
    return max(1, round(words / 200 + lines / 20))


def picture(notebook: NotebookNode, folder: Path) -> str:
    """Return the first PNG or SVG of the outputs, or else of the Markdown, as a data URI; "" if none."""
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
    paged = [card["name"] for card in shown if card["has_page"]]
    start = [(name, name[:2]) for name in paged if name[:2] in SHORT_PATH]
    template = Environment(autoescape=True).from_string((PAGES / "index.html.j2").read_text(encoding="utf-8"))
    failures = sum(card["status"] != "ok" for card in shown)
    is_whole = len(start) == len(SHORT_PATH)
    return template.render(acts=acts, start=start, is_whole=is_whole, count=len(shown), failures=failures)


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


def _slider(frames: dict[str, Any], shown: dict[str, Any], number: int) -> str:
    """Render several figures with a slider to choose one; ``shown`` is the base of their differences."""
    figures = [_arguments(merged(shown, one)) for one in frames["figures"]]
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
    """Return a figure's data and layout, at the page's width, as JavaScript to embed in a page."""
    layout = {key: value for key, value in figure.get("layout", {}).items() if key != "width"}
    call = [json.dumps(one) for one in (figure.get("data", []), layout)]
    return ", ".join(call).replace("</", "<\\/")


def _links(figure: str) -> str:
    """Return JavaScript that sets a figure's links after each drawing.

    plotly drops relative links on a page opened from a file.
    """
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


def _to_pages(body: str, names: set[str]) -> str:
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
