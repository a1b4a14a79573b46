"""Executed notebooks as HTML pages, and an index with a card for each; none needs a network."""

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
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from plotly.offline import get_plotlyjs

from rosellm.atomic import write_text
from rosellm.lab.figures.charts import PLOTLY
from rosellm.lab.figures.widgets import FRAMES, WIDGET
from rosellm.lab.records.findings import UNTOLD, finding
from rosellm.lab.records.records import find

RECORD = "gallery.json"
PAGE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js_requirejs %}<script src="plotly.min.js"></script>{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block body_header %}{{ super() }}
<style>
.jp-RenderedMarkdown .highlight { overflow-x: auto; margin-bottom: 1em }
.jp-RenderedMarkdown .highlight pre { font-family: var(--jp-code-font-family, monospace) }
.jp-RenderedMarkdown .highlight pre { font-size: var(--jp-code-font-size); white-space: pre }
</style>
<p style="margin: 1em 5em; font-family: sans-serif"><a href="index.html">All notebooks</a></p>
{% endblock %}"""

CARD = Template(
    """<article>$frame$image<h2>$title</h2></a>
<p>$finding</p>
<p class="run"><b class="$status">$status</b> $name · $minutes min · ran $seconds s$place
<small>$given</small></p>
<p><small>$error</small></p></article>"""
)

OPTIONS = "{responsive: true, displayModeBar: false}"
SLIDER = Template(
    """<label>$label <input type="range" min="0" max="$last" value="$first" id="$name-slider"></label>
<output id="$name-value"></output><div id="$name"></div><script>(() => {
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

INDEX = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>RoseLLM notebooks</title>
<style>
:root { color-scheme: light dark }
body { font: 15px/1.4 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1.2rem }
article { border: 1px solid #8885; border-radius: 8px; overflow: hidden; padding-bottom: .4rem }
article a { color: inherit; text-decoration: none }
img, i { display: block; width: 100%; height: 10rem; object-fit: contain; background: #fff }
i { background: #8882; font: bold 4rem/10rem system-ui; text-align: center; color: #888 }
h2 { font-size: 1.05rem } article h2, article p { margin: .5rem .8rem } .run { color: #888 }
.ok { color: #2a8a3a } .failed, .timeout { color: #d03030 }
</style></head><body>
<h1>RoseLLM notebooks</h1>
<p>$count executed, $failures failed. Findings are computed from the records of one $device: tokens per second
of whole runs, against the rung before. W0 to W3 are 1, 8, 64 and 256 sequences at a time, W4 and W5 are
streams.</p>
<main>
$cards
</main></body></html>
""")


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
    """A notebook as one HTML page; figures are drawn by the ``plotly.min.js`` beside it, images are embedded.

    ``folder`` is where the notebook's relative images are.
    """
    shown = without_widgets(nbformat.from_dict(notebook))
    for number, output in enumerate(_outputs(shown)):
        data = output.get("data", {})
        if FRAMES in data:
            output["data"] = {"text/html": _slider(data[FRAMES], number)}
        elif PLOTLY in data:
            output["data"] = {"text/html": _plot(data[PLOTLY], number)}
    exporter = HTMLExporter(embed_images=True, raw_template=PAGE)
    metadata = {"name": title(notebook) or "RoseLLM", "path": str(folder)}
    body, _ = exporter.from_notebook_node(shown, resources={"metadata": metadata})
    return _link_pages(body, {path.stem for path in folder.glob("*.ipynb")})


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
        "minutes": reading_minutes(committed),
        "picture": picture(committed, notebook.parent) or fresh,
    }


def _outcome(card: dict[str, Any]) -> Outcome:
    return Outcome(**{one.name: card[one.name] for one in fields(Outcome) if one.name in card})


def _index(cards: dict[str, dict[str, Any]], output: Path) -> str:
    return INDEX.substitute(
        count=len(cards),
        failures=sum(card["status"] != "ok" for card in cards.values()),
        device=find().device_name,
        cards="\n".join(_card_html(card, output) for card in cards.values()),
    )


def _card_html(card: dict[str, Any], output: Path) -> str:
    shown = {key: html.escape(str(value)) for key, value in card.items()}
    told = finding(find(), card["name"]).removeprefix(UNTOLD)
    shown["finding"] = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(told))
    image = f'<img src="{card["picture"]}" alt="">' if card["picture"] else f"<i>{shown['name'][:2]}</i>"
    page_exists = (output / f"{card['name']}.html").exists()
    frame = f'<a href="{shown["name"]}.html">' if page_exists else "<a>"
    given = " ".join(f"{name}={value}" for name, value in card["parameters"].items())
    return CARD.substitute(
        shown,
        frame=frame,
        image=image,
        seconds=f"{card['seconds']:.1f}",
        place=html.escape(place(_outcome(card))),
        given=html.escape(given),
    )


def _outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield from cell.outputs


def _plot(figure: dict[str, Any], number: int) -> str:
    name, arguments = f"figure-{number}", _arguments(figure)
    draw = f'Plotly.newPlot("{name}", {arguments}, {OPTIONS}){_links(arguments)}'
    return f'<div id="{name}"></div><script>{draw}</script>'


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
    """A figure's data and layout, as JavaScript inside a page."""
    call = [json.dumps(figure.get(key, default)) for key, default in (("data", []), ("layout", {}))]
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
