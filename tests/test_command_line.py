"""What all commands share: help that tells defaults."""

import argparse

import pytest

from rosellm.command_line import OneLineParser, command
from rosellm.errors import DeviceError
from rosellm.models.loading import resolve_device


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"default": 3}, "how many; default: 3"),
        ({"default": 0}, "how many; default: 0"),
        ({"default": (1, 4)}, "how many; default: 1,4"),
        ({"default": "5%"}, "how many; default: 5%"),
        ({"default": True, "action": argparse.BooleanOptionalAction}, "how many; default: on"),
        ({"default": False, "action": argparse.BooleanOptionalAction}, "how many; default: off"),
        ({"action": "store_true"}, "how many"),
        ({}, "how many"),
        ({"default": ""}, "how many"),
        ({"default": 3, "help": "some; default: three"}, "some; default: three"),
    ],
    ids=str,
)
def test_help_tells_a_default_once_as_it_is_typed(option, told):
    parser = OneLineParser(prog="p")
    parser.add_argument("--n", **{"help": "how many"} | option)
    assert parser.format_help().splitlines()[-1].split("  ")[-1].strip() == told


def test_a_usage_error_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as leaving:
        OneLineParser(prog="p").parse_args(["--no\nsuch"])
    assert leaving.value.code == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --no such\n"


def test_an_error_names_options_in_the_caller_s_own_way(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceError, match="is not available on this machine; use device='cpu'"):
        resolve_device("cuda")
    assert command(lambda argv: resolve_device("cuda"))([]) == 2
    assert (
        capsys.readouterr().err == "error: device 'cuda' is not available on this machine; use --device cpu\n"
    )
