"""Charts, diagrams and controls; all of the lab except ``records`` needs the extra ``notebooks``."""

from importlib.util import find_spec

_NEEDED = """IPython ipykernel jinja2 jupyter_client kaleido nbclient nbconvert nbformat nbstripout
    papermill PIL plotly yaml"""
_missing = [name for name in _NEEDED.split() if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"rosellm.lab needs {', '.join(_missing)}: pip install 'rosellm[notebooks]'", name=_missing[0]
    )
