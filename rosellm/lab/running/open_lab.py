"""Open a working copy of the notebooks in JupyterLab: ``make lab``.

The copy is in ``build/lab/notebooks``; the committed notebooks stay unchanged. Files edited there are kept,
the others follow the committed ones. Run as a script, so that the server does not import torch.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COPIED = "copied.json"


def working_copy(source: Path, folder: Path) -> list[str]:
    """Copy the files of ``source`` to ``folder``, but keep files that were edited there.

    Returns the names of the kept files whose original has changed since it was copied. A record of the copied
    contents is stored next to ``folder``.
    """
    record = folder.parent / COPIED
    before = json.loads(record.read_text()) if record.exists() else {}
    copied: dict[str, str | None] = {}
    kept = []
    for path in sorted(p for p in source.rglob("*") if p.is_file() and "." not in p.parent.name):
        name = path.relative_to(source).as_posix()
        target, now = folder / name, _digest(path)
        if not target.exists() or _digest(target) in (before.get(name), now):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
            copied[name] = now
        else:
            copied[name] = before.get(name)
            if now != before.get(name):
                kept.append(name)
    record.write_text(json.dumps(copied, indent=1))
    return kept


def options(root: Path) -> list[str]:
    """Return JupyterLab's options: serve only this machine, open the working copy, fetch no news.

    root: the checkout. Running as root is allowed.
    """
    chosen = [
        "--ip=127.0.0.1",
        f"--ServerApp.root_dir={root}",
        "--LabApp.default_url=/lab/tree/build/lab/notebooks",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    return [*chosen, "--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else chosen


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Update the working copy, then serve JupyterLab until interrupted."""
    for name in working_copy(ROOT / "notebooks", ROOT / "build/lab/notebooks"):
        print(f"build/lab/notebooks/{name} is kept as you edited it; notebooks/{name} is newer")
    from jupyterlab.labapp import main as serve

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ends the server and its kernels
    try:
        serve([*options(ROOT), *sys.argv[1:]])
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while libraries load ends it without a traceback
    main()
