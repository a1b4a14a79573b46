"""How notebooks are named on the command line."""

import pytest

from rosellm.lab.running.notebook_workers import NotebookError
from rosellm.lab.running.run_notebooks import select


@pytest.fixture
def folder(tmp_path):
    for name in ("03_pinned_h2d", "05_cuda_graph", "13_resident_step", "24_faults"):
        (tmp_path / f"{name}.ipynb").touch()
    return tmp_path


@pytest.mark.parametrize("word", ["03", "03_pinned_h2d", "notebooks/03_pinned_h2d.ipynb", "pinned", "h2d"])
def test_a_notebook_is_named_by_number_path_or_a_part_of_its_name(folder, word):
    assert [path.stem for path in select(folder, word)] == ["03_pinned_h2d"]


def test_a_beginning_goes_before_a_part(folder):
    assert [path.stem for path in select(folder, "24")] == ["24_faults"]
    assert [path.stem for path in select(folder, "3_")] == ["03_pinned_h2d", "13_resident_step"]


@pytest.mark.parametrize("word", ["nothing", "notebooks/nothing.ipynb", ".ipynb"])
def test_what_names_no_notebook_is_told(folder, word):
    with pytest.raises(NotebookError, match="no notebook is called"):
        select(folder, word)


@pytest.mark.parametrize("wanted", [",", " , ", ",,"])
def test_a_selection_that_names_nothing_is_told_and_not_taken_for_all(folder, wanted):
    with pytest.raises(NotebookError, match="names no notebook: there are 03_pinned_h2d, 05_cuda_graph"):
        select(folder, wanted)
