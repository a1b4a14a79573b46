"""What all commands share: help that tells defaults and fits a screen."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

import pytest

from rosellm.command_line import OneLineParser, command
from rosellm.errors import DeviceError
from rosellm.models.loading import resolve_device

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"default": 3}, "how many; default: 3"),
        ({"default": (1, 4)}, "how many; default: 1,4"),
        ({"default": True, "action": argparse.BooleanOptionalAction}, "how many; default: on"),
        ({"default": ""}, "how many"),
        ({"default": 3, "help": "some; default: three"}, "some; default: three"),
    ],
    ids=str,
)
def test_help_tells_a_default_once_as_it_is_typed(option, told):
    parser = OneLineParser(prog="p")
    parser.add_argument("--n", **{"help": "how many"} | option)
    assert parser.format_help().splitlines()[-1].split("  ")[-1].strip() == told


def test_an_error_names_options_in_the_caller_s_own_way(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceError, match="is not available on this machine; use device='cpu'"):
        resolve_device("cuda")
    assert command(lambda argv: resolve_device("cuda"))([]) == 2
    assert (
        capsys.readouterr().err == "error: device 'cuda' is not available on this machine; use --device cpu\n"
    )


def test_an_error_of_ours_is_not_taken_for_the_users():
    with pytest.raises(ZeroDivisionError):
        command(lambda argv: 1 // 0)([])


NO_HELP = "open_lab"  # JupyterLab's options
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "rosellm").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8") and path.stem != NO_HELP
)


def help_of(command: str, capsys: pytest.CaptureFixture, option: str = "--help") -> list[str]:
    with pytest.raises(SystemExit) as leaving:
        import_module(command).main([option])
    assert leaving.value.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [command])
    lines = help_of(command, capsys)
    assert len(lines) <= 50 and max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", [name for name in COMMANDS if name.endswith(("scheduler", "streaming"))])
def test_what_help_leaves_out_help_all_tells(command, capsys):
    short, whole = ("\n".join(help_of(command, capsys, option)) for option in ("--help", "--help-all"))
    assert "--help-all" in short and "--block-size" not in short and "--top-k" not in short
    assert all(option in whole for option in ("--block-size", "--top-k", "--workload", "--rung"))
    assert set(short.splitlines()) <= set(whole.splitlines())
