"""The command ``python -m rosellm.roseinfer.benchmark_rivals``."""

import sys

from rosellm.bench.benchmark_rivals import main

if __name__ == "__main__":
    sys.exit(main())
