"""The command ``python -m rosellm.bench NAME``."""

import sys

from rosellm.bench import steps

COMMANDS = {"steps": steps.main}

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        print(f"error: name a benchmark: python -m rosellm.bench {'|'.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(COMMANDS[name](sys.argv[2:]))
