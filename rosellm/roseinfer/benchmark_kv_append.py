"""The command ``python -m rosellm.roseinfer.benchmark_kv_append``."""

import sys

from rosellm.bench.benchmark_kv_append import main

if __name__ == "__main__":
    sys.exit(main())
