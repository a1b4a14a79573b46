"""The command ``python -m rosellm.roseinfer.benchmark_scheduler``."""

import sys

from rosellm.bench.benchmark_scheduler import main

if __name__ == "__main__":
    sys.exit(main())
