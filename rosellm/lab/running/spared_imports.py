"""Spares 1.5 s: jsonschema, which reads notebooks, compiles a grammar of the IRIs that they have none of.

To be imported before nbformat, papermill and nbconvert.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
