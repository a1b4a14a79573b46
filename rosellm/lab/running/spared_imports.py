"""Spares 1.5 s: who reads notebooks imports jsonschema, which compiles a grammar of IRIs; notebooks have none.

To be imported before nbformat, papermill and nbconvert.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
