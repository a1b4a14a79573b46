"""The command ``python -m rosellm.roseinfer.benchmark_streaming``."""

import sys

from rosellm.bench.benchmark_streaming import main

if __name__ == "__main__":
    sys.exit(main())
