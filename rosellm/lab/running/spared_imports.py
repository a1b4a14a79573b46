"""Save 1.5 s: jsonschema, which validates notebooks, compiles a grammar for IRIs, which they do not use.

Import before nbformat, papermill and nbconvert.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
