"""The house: who may import whom, read off the imports themselves."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rosellm"

# From the ground up. A file imports from its own floor or below; a folder stands for all files in it.
FLOORS = (
    ("errors", "atomic", "command_line", "environment", "frozen_heap", "no_collection", "triton_or_none"),
    ("models/*",),
    ("rosetrainer/*",),
    ("roseinfer/ranks/*",),
    (
        "roseinfer/text",
        "roseinfer/request",
        "roseinfer/rung",
        "roseinfer/sampling",
        "roseinfer/outputs",
        "roseinfer/owned",
        "roseinfer/kv_append_triton",
    ),
    ("roseinfer/cache/*",),
    ("roseinfer/kernels/*",),
    ("roseinfer/layers/*",),
    ("roseinfer/steps/*",),
    ("roseinfer/exhibits",),
    ("ladder/*",),
    ("roseinfer/recipe",),
    ("roseinfer/assembly",),
    ("roseinfer/trial",),
    ("roseinfer/engine",),
    ("roseinfer/tensor_parallel",),
    ("roseinfer/serving/*",),
    ("cluster/*",),
    ("roseinfer/llm",),
    ("bench/*",),
    ("roseinfer/benchmark_*",),
    ("lab/records/*",),
    ("lab/scale/*",),
    ("lab/figures/*",),
    ("lab/trying/*",),
    ("lab/recorded",),
    ("lab/rung",),
    ("lab/diagnose/*",),
    ("lab/running/*",),
    ("lab/measure",),
)
# What others build on: it knows nothing even of its neighbours.
FOUNDATIONS = ("roseinfer/cache/kv_blocks", "roseinfer/cache/device_state")


@dataclass
class File:
    """What one file takes from others: files by their path in the package, and private names."""

    imports: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)


def read(package: Path) -> dict[str, File]:
    """Path in the package, without suffix → what that file takes; front doors (``__init__``) are left out."""
    trees = {
        path.relative_to(package).with_suffix("").as_posix(): ast.parse(path.read_text())
        for path in sorted(package.rglob("*.py"))
        if path.name != "__init__.py"
    }
    own = {name: set(_private_names(tree)) for name, tree in trees.items()}
    return {name: _file(name, tree, package.name, own) for name, tree in trees.items()}


def _file(name: str, tree: ast.Module, package: str, own: Mapping[str, set[str]]) -> File:
    file, modules = File(), {}
    for module, imported, alias in _imports(tree, f"{package}/{name}"):
        inside = module.removeprefix(package).lstrip("/")
        if not f"{module}/".startswith(f"{package}/"):
            continue
        file.imports |= {target for target in (inside, f"{inside}/{imported}".lstrip("/")) if target in own}
        modules[alias] = f"{inside}/{imported}".lstrip("/")
        if _is_private(imported) or any(map(_is_private, inside.split("/"))):
            file.private.add(f"{module}/{imported}")
    elsewhere = set().union(*(names for other, names in own.items() if other != name)) - own[name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            of_module = isinstance(node.value, ast.Name) and modules.get(node.value.id) in own
            if of_module or node.attr in elsewhere:
                file.private.add(ast.unparse(node))
    return file


def _imports(tree: ast.Module, path: str) -> Iterator[tuple[str, str, str]]:
    """(module, name imported from it, what that is called here); at any depth, under any condition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                parent, _, last = one.name.replace(".", "/").rpartition("/")
                yield parent or last, last if parent else "", one.asname or one.name
        elif isinstance(node, ast.ImportFrom):
            base = path.split("/")[: -node.level] if node.level else []
            module = "/".join([*base, *(node.module or "").split(".")]).rstrip("/")
            for one in node.names:
                yield module, one.name, one.asname or one.name


def _private_names(tree: ast.Module) -> Iterator[str]:
    """Private functions, classes, variables and attributes that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in ("self", "cls"):
            name = node.attr
        else:
            continue
        if _is_private(name):
            yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def floor_of(name: str, floors: tuple[tuple[str, ...], ...]) -> int | None:
    found = [i for i, rooms in enumerate(floors) if any(fnmatch(name, room) for room in rooms)]
    return found[0] if len(found) == 1 else None


def homeless(files: Mapping[str, File], floors) -> list[str]:
    """Files on no floor, or on two."""
    return [name for name in files if floor_of(name, floors) is None]


def upward(files: Mapping[str, File], floors) -> list[str]:
    """Imports from a floor above the file's own."""
    return [
        f"{name} imports {target}"
        for name, file in files.items()
        for target in sorted(file.imports)
        if floor_of(target, floors) > floor_of(name, floors)
    ]


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of two or more that reach each other."""
    reached = {name: _reachable(name, imports) for name in imports}
    together = {
        tuple(sorted({name, *(other for other in reached[name] if name in reached[other])}))
        for name in imports
        if name in reached[name]
    }
    return [list(names) for names in sorted(together)]


def _reachable(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    found, ahead = set(), list(imports[name])
    while ahead:
        one = ahead.pop()
        if one not in found:
            found.add(one)
            ahead += imports[one]
    return found


def by_file(files: Mapping[str, File]) -> dict[str, set[str]]:
    return {name: file.imports for name, file in files.items()}


def by_folder(files: Mapping[str, File]) -> dict[str, set[str]]:
    """The same between folders; where a folder holds further ones, its own files stand for themselves."""
    folders = {name.rpartition("/")[0] for name in files}
    outer = {folder for folder in folders if any(other.startswith(f"{folder}/") for other in folders)} | {""}

    def room(name: str) -> str:
        folder = name.rpartition("/")[0]
        return name if folder in outer else folder

    rooms: dict[str, set[str]] = defaultdict(set)
    for name, file in files.items():
        rooms[room(name)] |= {room(target) for target in file.imports} - {room(name)}
    return rooms


def private(files: Mapping[str, File]) -> list[str]:
    """Private names of one file that another takes."""
    return [f"{name}: {taken}" for name, file in files.items() for taken in sorted(file.private)]


@pytest.fixture(scope="module")
def house() -> dict[str, File]:
    return read(PACKAGE)


@pytest.mark.slow
def test_every_file_has_one_floor(house):
    assert homeless(house, FLOORS) == []
    empty = [room for rooms in FLOORS for room in rooms if not any(fnmatch(name, room) for name in house)]
    assert empty == []


def test_no_file_imports_from_a_floor_above_its_own(house):
    assert upward(house, FLOORS) == []


def test_no_circle_between_files_or_folders(house):
    assert circles(by_file(house)) == []
    assert circles(by_folder(house)) == []


def test_the_foundations_import_only_from_floors_below(house):
    for name in FOUNDATIONS:
        below = floor_of(name, FLOORS)
        assert [target for target in house[name].imports if floor_of(target, FLOORS) >= below] == [], name


def test_no_private_name_crosses_a_file(house):
    assert private(house) == []


def test_the_front_doors_of_folders_import_nothing_of_the_package():
    doors = [path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    assert len(doors) > 5
    taken = {door: {one[0] for one in _imports(ast.parse(door.read_text()), "x")} for door in doors}
    outside = {m.partition("/")[0] for names in taken.values() for m in names} - sys.stdlib_module_names
    assert outside == set()


SOUND = {
    "errors": "class _Hidden: ...\n_table = {}\nclass Fault(Exception):\n    _code = 1",
    "low/store": "from house.errors import Fault\nclass Store:\n    def __init__(self): self._held = 1",
    "low/books": "import house.low.store",
    "high/engine": "from house.low import books\ndef run(store): return store.held, store._replace(), run._x",
}
GROUND_UP = (("errors",), ("low/*",), ("high/*",))


def made(tmp_path: Path, **changes: str) -> dict[str, File]:
    """A small sound house, with files added or replaced; ``low__store`` is low/store."""
    for name, source in (SOUND | {name.replace("__", "/"): text for name, text in changes.items()}).items():
        path = tmp_path / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return read(tmp_path / "house")


@pytest.mark.parametrize(
    "source",
    [
        "from house.high import engine",
        "from house.high.engine import run",
        "import house.high.engine as engine",
        "from ..high import engine",
        "def late():\n    from house.high.engine import run",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.high import engine",
    ],
)
def test_an_import_from_a_floor_above_is_found(tmp_path, source):
    assert upward(made(tmp_path, low__store=source), GROUND_UP) == ["low/store imports high/engine"]


def test_a_file_without_a_floor_or_with_two_is_found(tmp_path):
    files = made(tmp_path, attic="")
    assert homeless(files, GROUND_UP) == ["attic"]
    assert homeless(files, (*GROUND_UP, ("attic", "errors"))) == ["errors"]


def test_circles_are_found_between_files_and_between_folders(tmp_path):
    files = made(tmp_path, low__store="from house.low import books")
    assert circles(by_file(files)) == [["low/books", "low/store"]]
    files = made(tmp_path, low__store="", low__lone="from house.high import other", high__other="")
    assert circles(by_file(files)) == []
    assert circles(by_folder(files)) == [["high", "low"]]


@pytest.mark.parametrize(
    "source, taken",
    [
        ("from house.errors import _Hidden", "house/errors/_Hidden"),
        ("from house import errors\nerrors._table", "errors._table"),
        ("import house.errors as e\ne._table", "e._table"),
        ("_table = 1\nfrom house import errors\nerrors._table", "errors._table"),
        ("def use(store): return store._held", "store._held"),
        ("def use(fault): fault._code += 1", "fault._code"),
    ],
)
def test_a_private_name_that_crosses_a_file_is_found(tmp_path, source, taken):
    assert private(made(tmp_path, high__user=source)) == [f"high/user: {taken}"]
