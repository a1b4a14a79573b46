"""Why is my decoding slow? ``python -m rosellm.lab.diagnose --model rose-tiny --rung paged --batch 8``.

Measures this machine's ceilings, profiles decode steps, attributes their time, names what bounds them, and
benchmarks remedies for a few steps each; on a busy machine it says so and compares nothing. With
--transformers, diagnoses the generate of transformers, with its cache, on the same checkpoint.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from rosellm.bench.options import add_device_options, count
from rosellm.command_line import OneLineParser, command
from rosellm.errors import OptionError
from rosellm.lab.diagnose import steps
from rosellm.lab.diagnose.diagnosis import Diagnosis, diagnose
from rosellm.models.checkpoint import SHIPPED
from rosellm.models.loading import LOAD_FORMATS, load_parts
from rosellm.roseinfer.recipe import LADDER, get_rung


def parser() -> OneLineParser:
    """Build the argument parser."""
    description = (__doc__ or "").partition("\n\n")[2]
    made = OneLineParser(prog="python -m rosellm.lab.diagnose", description=description)
    add = made.add_argument
    add("--model", default=SHIPPED, metavar="MODEL", help="hub id, local folder or a shipped model")
    dummy = "dummy: the model's shape with seeded random weights, no download"
    add("--load-format", choices=LOAD_FORMATS, default="auto", help=dummy)
    add("--rung", metavar="NAME", help=f"default: the device's best; of {', '.join(LADDER)}")
    add("--transformers", action="store_true", help="diagnose transformers' generate instead")
    add("--batch", **count(8, high=steps.MOST_BATCH), help="sequences in the batch")
    add("--context", **count(256, high=steps.MOST_CONTEXT), help="cached tokens per sequence")
    add_device_options(made)
    return made


def run(options: Namespace) -> Diagnosis:
    """Load the model, then measure and diagnose it.

    Raises ``OptionError`` if a rung is given with transformers.
    """
    if options.transformers and options.rung is not None:
        raise OptionError(
            "--rung selects a rung of this engine, which --transformers does not run; give only one of them"
        )
    model, _ = load_parts(options.model, options.device, options.dtype, options.load_format)
    sizes = options.batch, options.context
    subject: steps.Steps
    if options.transformers:
        theirs = steps.load_transformers(options.model, options.load_format, model)
        subject = steps.TransformersSteps(theirs, *sizes)
    else:
        subject = steps.EngineSteps(model, get_rung(options.rung, model.device), *sizes)
    subject.name = f"{options.model}, {subject.name}"
    return diagnose(subject, ours=lambda: model, progress=_tell)


def _tell(stage: str) -> None:
    print(f"{stage} ...", file=sys.stderr, flush=True)


@command
def main(argv: list[str] | None = None) -> None:
    """Print the diagnosis."""
    print(run(parser().parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
