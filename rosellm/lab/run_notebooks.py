"""Executes notebooks in batch and makes a gallery of the results: ``python -m rosellm.lab.run_notebooks``.

Each notebook runs in a worker process of its own (papermill, in the notebooks' folder, with the interpreter
that runs this command). The output folder receives the executed notebook and an HTML page of each, and an
index of all.
"""

import argparse
import base64
import html
import json
import logging
import multiprocessing
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from string import Template
from typing import Any

import nbformat
import papermill
import psutil
import yaml
from ipykernel.kernelspec import write_kernel_spec
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from rosellm.errors import RoseError

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
GRACE_SECONDS = 5.0


class NotebookError(RoseError):
    """A notebook or a parameter that does not exist, or a notebook that cannot be executed as asked."""


@dataclass(frozen=True)
class Job:
    """One notebook to execute; its results go to ``scratch`` under the notebook's own name."""

    notebook: Path
    parameters: dict[str, Any]
    scratch: Path


@dataclass(frozen=True)
class Outcome:
    """What became of a notebook: ``status`` is "ok", "failed" or "timeout"; ``seconds`` is its run time."""

    name: str
    seconds: float
    status: str
    error: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass
class Running:
    job: Job
    process: BaseProcess
    channel: Connection
    started: float


def select(folder: Path, wanted: str = "") -> list[Path]:
    """The notebooks of ``folder`` whose name, or its beginning, is in ``wanted``.

    ``wanted`` is comma or space separated; "" means all. Raises NotebookError for a name without a notebook.
    """
    found = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    if not found:
        raise NotebookError(f"there is no notebook in {folder}")
    chosen = set() if wanted.strip() else set(found)
    for word in wanted.replace(",", " ").split():
        word = word.removesuffix(".ipynb")
        matches = {word} & set(found) or {name for name in found if name.startswith(word)}
        if not matches:
            raise NotebookError(f"no notebook is called {word!r}: there are {', '.join(found)}")
        chosen |= matches
    return [path for name, path in found.items() if name in chosen]


def parse_parameters(text: str) -> dict[str, Any]:
    """``name=value`` pairs, space separated; a value is JSON or else YAML (``quick=false``, ``batch=[1,2]``).

    Raises NotebookError for a pair that cannot be read.
    """
    try:
        pairs = [word.partition("=") for word in shlex.split(_keep_lists(text))]
    except ValueError as error:
        raise NotebookError(f"the parameters {text!r} cannot be read: {error}") from None
    for name, equals, _ in pairs:
        if not equals or not name.isidentifier():
            raise NotebookError(f"a parameter is given as name=value, not as {name + equals!r}")
    return {name: _value(name, value) for name, _, value in pairs}


def check_parameters(notebooks: Sequence[Path], parameters: dict[str, Any]) -> None:
    """Raises NotebookError unless every one of the notebooks has every one of the parameters."""
    for notebook in notebooks if parameters else ():
        known = papermill.inspect_notebook(notebook)
        for name in parameters.keys() - known.keys():
            raise NotebookError(
                f"{notebook.stem} has no parameter {name!r}: it has {', '.join(sorted(known)) or 'none'}"
            )


def kernel_environment(folder: Path) -> dict[str, str]:
    """Environment in which the kernel "python3" is this interpreter, whatever kernels the machine has.

    The kernel's description is written to ``folder``, which must stay while kernels are started.
    """
    write_kernel_spec(folder / "kernels" / "python3", extra_arguments=["--log-level=ERROR"])
    return {"JUPYTER_PATH": str(folder), "OMP_NUM_THREADS": "1"}


def run(
    notebooks: Sequence[Path],
    output: Path,
    parameters: dict[str, Any] | None = None,
    workers: int = 2,
    timeout: float = 300.0,
) -> list[Outcome]:
    """Executes the notebooks, ``workers`` at a time, and publishes what they leave in ``output``.

    A notebook that takes more than ``timeout`` seconds is ended. The notebooks themselves are only read.
    Raises NotebookError for an unknown parameter, before anything runs.
    """
    parameters = parameters or {}
    check_parameters(notebooks, parameters)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".run-", ignore_cleanup_errors=True) as scratch:
        jobs = [Job(path.resolve(), parameters, Path(scratch).resolve()) for path in notebooks]
        outcomes = _supervise(jobs, workers, timeout)
        for job in jobs:
            _publish(job, output)
        _publish_gallery({job.notebook.stem: job.notebook for job in jobs}, outcomes, output)
    return outcomes


def page(notebook: NotebookNode, folder: Path) -> str:
    """A notebook as one HTML page; figures are drawn by the ``plotly.min.js`` beside it, images are embedded.

    ``folder`` is where the notebook's relative images lie.
    """
    shown = without_widgets(nbformat.from_dict(notebook))
    for number, output in enumerate(_outputs(shown)):
        figure = output.get("data", {}).get(PLOTLY)
        if figure is not None:
            output["data"] = {"text/html": _plot(figure, number)}
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


def picture(notebook: NotebookNode, folder: Path) -> str:
    """The first PNG or SVG among the outputs, or else in the Markdown, as a data URI; "" if there is none."""
    for kind in ("image/png", "image/svg+xml"):
        for output in _outputs(notebook):
            if kind in output.get("data", {}):
                return _data_uri(kind, output["data"][kind])
    return next(_markdown_pictures(notebook, folder), "")


def write(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old text or the new one, never half."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(text, encoding="utf-8")
    os.replace(half, path)


def _keep_lists(text: str) -> str:
    return re.sub(r"(?<==)\[[^\]]*\]", lambda match: shlex.quote(match[0]), text)


def _value(name: str, text: str) -> Any:
    with suppress(json.JSONDecodeError):
        return json.loads(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise NotebookError(f"the value of parameter {name!r} cannot be read as YAML: {text!r}") from None


def _supervise(jobs: Sequence[Job], workers: int, timeout: float) -> list[Outcome]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rosellm", "papermill", "nbconvert"])
    waiting, running, outcomes = deque(jobs), [], []
    try:
        with tqdm(total=len(jobs), unit="notebook") as bar:
            while waiting or running:
                while waiting and len(running) < workers:
                    running.append(_start(context, waiting.popleft()))
                bar.set_postfix_str(", ".join(one.job.notebook.stem for one in running))
                oldest = min(one.started for one in running)
                wait([one.process.sentinel for one in running], max(0.0, oldest + timeout - time.monotonic()))
                for one in [one for one in running if _is_over(one, timeout)]:
                    outcomes.append(_finish(one, timeout))
                    running.remove(one)
                    bar.update()
    finally:
        _end([one.process for one in running])
    return sorted(outcomes, key=lambda outcome: outcome.name)


def _start(context: multiprocessing.context.BaseContext, job: Job) -> Running:
    channel, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, theirs))
    process.start()
    theirs.close()
    return Running(job, process, channel, time.monotonic())


def _is_over(running: Running, timeout: float) -> bool:
    return running.process.exitcode is not None or time.monotonic() - running.started >= timeout


def _finish(running: Running, timeout: float) -> Outcome:
    job, code = running.job, running.process.exitcode
    if code is None:
        _end([running.process])
        return Outcome(job.notebook.stem, timeout, "timeout", f"not done after {timeout:g} s", job.parameters)
    try:
        seconds, error = running.channel.recv()
    except EOFError:
        seconds, error = time.monotonic() - running.started, f"its worker process ended with exit code {code}"
    return Outcome(job.notebook.stem, seconds, "failed" if error else "ok", error, job.parameters)


def _end(processes: Sequence[BaseProcess]) -> None:
    """Ends the workers with their kernels: politely first, so that kernels leave no files, then surely."""
    family = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
        process.terminate()
    for process in processes:
        process.join(GRACE_SECONDS)
        process.kill()
        process.join()
    for relative in family:
        with suppress(psutil.NoSuchProcess):
            relative.kill()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _work(job: Job, channel: Connection) -> None:
    signal.signal(
        signal.SIGINT, lambda *_: None
    )  # Ctrl-C reaches the whole group; the supervisor ends the workers
    signal.signal(signal.SIGTERM, _interrupt)
    logging.getLogger("papermill").setLevel(logging.ERROR)
    os.environ.update(kernel_environment(job.scratch / "kernels" / job.notebook.stem))
    with suppress(KeyboardInterrupt):
        channel.send(_execute(job))


def _execute(job: Job) -> tuple[float, str]:
    executed, started, error = job.scratch / job.notebook.name, time.monotonic(), ""
    try:
        papermill.execute_notebook(
            job.notebook,
            executed,
            job.parameters,
            kernel_name="python3",
            cwd=job.notebook.parent,
            progress_bar=False,
            shutdown_kernel="immediate",
        )
    except PapermillExecutionError as failure:
        error = f"cell {failure.exec_count}: {failure.ename}: {_first_line(failure.evalue)}"
    except Exception as failure:
        error = f"{type(failure).__name__}: {_first_line(str(failure))}"
    seconds = time.monotonic() - started
    if executed.exists():
        text = page(nbformat.read(executed, as_version=4), job.notebook.parent)
        executed.with_suffix(".html").write_text(text, encoding="utf-8")
    return seconds, error


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _publish(job: Job, output: Path) -> None:
    """Moves what the job left to the output folder; what only an earlier run left there goes."""
    for suffix in (".ipynb", ".html"):
        made, published = (folder / (job.notebook.stem + suffix) for folder in (job.scratch, output))
        if made.exists():
            os.replace(made, published)
        else:
            published.unlink(missing_ok=True)


def _publish_gallery(notebooks: dict[str, Path], outcomes: Sequence[Outcome], output: Path) -> None:
    record = output / "gallery.json"
    cards = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    cards |= {outcome.name: _card(notebooks[outcome.name], outcome, output) for outcome in outcomes}
    folder = next(iter(notebooks.values())).parent
    cards = {name: cards[name] for name in sorted(cards) if (folder / f"{name}.ipynb").exists()}
    write(output / "plotly.min.js", get_plotlyjs())
    write(record, json.dumps(cards, indent=1))
    write(output / "index.html", _index(cards, output))


def _card(notebook: Path, outcome: Outcome, output: Path) -> dict[str, Any]:
    committed = nbformat.read(notebook, as_version=4)
    executed = output / notebook.name
    fresh = picture(nbformat.read(executed, as_version=4), notebook.parent) if executed.exists() else ""
    return asdict(outcome) | {
        "title": title(committed) or outcome.name,
        "picture": fresh or picture(committed, notebook.parent),
    }


def _index(cards: dict[str, dict[str, Any]], output: Path) -> str:
    return INDEX.substitute(
        count=len(cards),
        failures=sum(card["status"] != "ok" for card in cards.values()),
        cards="\n".join(_card_html(card, output) for card in cards.values()),
    )


def _card_html(card: dict[str, Any], output: Path) -> str:
    shown = {key: html.escape(str(value)) for key, value in card.items()}
    image = f'<img src="{card["picture"]}" alt="">' if card["picture"] else f"<i>{shown['name'][:2]}</i>"
    page_exists = (output / f"{card['name']}.html").exists()
    frame = f'<a href="{shown["name"]}.html">' if page_exists else "<a>"
    given = " ".join(f"{name}={value}" for name, value in card["parameters"].items())
    return CARD.substitute(
        shown,
        frame=frame,
        image=image,
        seconds=f"{card['seconds']:.1f}",
        given=html.escape(given),
    )


def _outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield from cell.outputs


def _plot(figure: dict[str, Any], number: int) -> str:
    call = [json.dumps(figure.get(key, default)) for key, default in (("data", []), ("layout", {}))]
    arguments = ", ".join(call).replace("</", "<\\/")
    return (
        f'<div id="figure-{number}"></div>'
        f'<script>Plotly.newPlot("figure-{number}", {arguments}, {{responsive: true}})</script>'
    )


def _link_pages(body: str, names: set[str]) -> str:
    def to_page(match: re.Match[str]) -> str:
        return f'href="{match[1]}.html' if match[1] in names else match[0]

    return re.sub(r'href="(?:\./)?([\w.-]+)\.ipynb', to_page, body)


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


PAGE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js_requirejs %}<script src="plotly.min.js"></script>{% endblock %}
{% block body_header %}{{ super() }}
<p style="margin: 1em 5em; font-family: sans-serif"><a href="index.html">All notebooks</a></p>
{% endblock %}"""

CARD = Template(
    """<article>$frame$image<h2>$title</h2></a>
<p><b class="$status">$status</b> $name · $seconds s <small>$given</small></p>
<p><small>$error</small></p></article>"""
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
h2 { font-size: 1.05rem } article h2, article p { margin: .5rem .8rem }
.ok { color: #2a8a3a } .failed, .timeout { color: #d03030 }
</style></head><body>
<h1>RoseLLM notebooks</h1>
<p>$count executed, $failures failed.</p>
<main>
$cards
</main></body></html>
""")


def _table(outcomes: Sequence[Outcome]) -> str:
    width = max(len("notebook"), *(len(outcome.name) for outcome in outcomes))
    rows = [f"{outcome.name:<{width}}  {outcome.seconds:7.1f}  {outcome.status}" for outcome in outcomes]
    return "\n".join([f"{'notebook':<{width}}  seconds  status", *rows])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"), help="their folder")
    parser.add_argument("--output", type=Path, default=Path("build"), help="folder of the results")
    parser.add_argument("--select", default="", help="names or their beginnings, comma or space separated")
    parser.add_argument("--parameters", default="", help="name=value pairs, space separated")
    parser.add_argument("--workers", type=int, default=2, help="notebooks at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a notebook may take")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1 or arguments.timeout <= 0:
        given = f"{arguments.workers} and {arguments.timeout:g}"
        raise NotebookError(f"workers must be 1 or more and timeout above 0, not {given}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if a notebook failed, 2 for a wrong request, 130 if interrupted."""
    try:
        arguments = _arguments(argv)
        notebooks = select(arguments.notebooks, arguments.select)
        parameters = parse_parameters(arguments.parameters)
        outcomes = run(notebooks, arguments.output, parameters, arguments.workers, arguments.timeout)
    except RoseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(_table(outcomes))
    print(f"gallery: {arguments.output / 'index.html'}")
    failures = [outcome for outcome in outcomes if outcome.status != "ok"]
    for outcome in failures:
        print(f"FAILED {outcome.name}: {outcome.error}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
