"""Code that all commands share: one-line errors, help with defaults, bounded integer options."""

from __future__ import annotations

import argparse
import os
import re
import reprlib
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch

from rosellm.errors import RoseError

HUB_TIMEOUT_SECONDS = "3"
INT32_MAX = 2**31 - 1
OPTION = re.compile(r"\b(device|load_format|rung)='(\w+)'")
SMALLER = "a smaller batch, fewer KV blocks or a smaller model"


class HelpWithDefaults(argparse.HelpFormatter):
    """A help formatter that appends each option's default, unless the help mentions a default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        is_switch = action.const is True
        if default in (None, "", argparse.SUPPRESS) or is_switch or "default" in text:
            return text
        return f"{text}; default: {_shown(default).replace('%', '%%')}"


def _shown(default: object) -> str:
    """Format a default as a user would type it on the command line."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line on stderr and exits with status 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpWithDefaults, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())}\n")


class ScreenParser(OneLineParser):
    """A parser whose ``--help`` fits on a screen.

    details: titles of the option groups that only ``--help-all`` shows, as it alone shows the epilog.
    """

    def __init__(self, details: tuple[str, ...], **options: Any) -> None:
        super().__init__(**options)
        self._details = details
        self.add_argument(
            "--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help="show all options"
        )

    def format_help(self) -> str:
        parts = self.format_whole_help().rstrip().split("\n\n")
        kept = parts[:-1] if self.epilog else parts
        left_out = tuple(f"{title}:\n" for title in self._details)
        return "\n\n".join(part for part in kept if not part.startswith(left_out)) + "\n"

    def format_whole_help(self) -> str:
        return super().format_help()


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_given: object) -> NoReturn:
        assert isinstance(parser, ScreenParser)
        print(parser.format_whole_help(), end="")
        parser.exit()


def whole_number(low: int, high: int = INT32_MAX) -> Callable[[str], int]:
    """Return an argparse type that accepts an integer from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a whole number, {low} or more")
        if value > high:
            raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is too large; use at most {high}")
        return value

    return parse


def whole_numbers(high: int) -> Callable[[str], tuple[int, ...]]:
    """Return an argparse type that accepts comma-separated integers from 1 to ``high``."""
    one = whole_number(1, high)
    return lambda text: tuple(map(one, text.split(",")))


class Main(Protocol):
    """A command's entry point, which returns its exit status.

    argv: the arguments; None means those of the command line.
    """

    def __call__(self, argv: list[str] | None = None) -> int: ...


def command(body: Callable[[list[str] | None], None], *, out_of_memory: str = SMALLER) -> Main:
    """Turn ``body`` into a command's ``main``, which prints user errors in one line on stderr.

    body: runs the command; its ``argv`` may be None, which means the command line.
    out_of_memory: what the user is advised to ask for when memory runs out.

    The exit status is 0, or 2 after a user error, or 130 after Ctrl-C.
    """

    def main(argv: list[str] | None = None) -> int:
        os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", HUB_TIMEOUT_SECONDS)
        _take_over_interrupts()
        try:
            body(argv)
        except RoseError as error:
            return _fail(as_typed(str(error)))
        except OSError as error:
            return _fail(str(error))
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            return _fail(f"out of memory; ask for {out_of_memory}")
        except KeyboardInterrupt:
            return _fail("interrupted", status=130)
        return 0

    return main


def _take_over_interrupts() -> None:
    """Make Ctrl-C raise ``KeyboardInterrupt``, if it still ends the process as it does during imports."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def as_typed(message: str) -> str:
    """Rewrite Python arguments in ``message`` as options: ``device='cpu'`` becomes ``--device cpu``."""
    return OPTION.sub(lambda option: f"--{option[1].replace('_', '-')} {option[2]}", message)


def _fail(message: str, status: int = 2) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether Python, numpy or torch could not allocate memory, or a size in bytes overflowed."""
    told = ("allocate memory", "Storage size calculation overflowed")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(t in str(error) for t in told)
