"""Save 1.5 s when a program imports nbformat, papermill or nbconvert; import this module before them.

To validate notebooks, they import jsonschema, which would compile a grammar for IRIs. Notebooks have no IRIs.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
