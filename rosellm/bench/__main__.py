"""Benchmarks by name: ``python -m rosellm.bench NAME``."""

from __future__ import annotations

from rosellm.bench import campaign, drafts, formats, steps, tune, verify
from rosellm.command_line import OneLineParser, command


@command
def main(argv: list[str] | None = None) -> None:
    """Run the benchmark of that name."""
    parser = OneLineParser(prog="python -m rosellm.bench", description="Run a benchmark.")
    benchmarks = parser.add_subparsers(metavar="NAME", required=True)
    steps.add_to(benchmarks.add_parser("steps", help="the time of a step for each number of rows"))
    drafts.add_to(benchmarks.add_parser("drafts", help="what drafting gains on three texts"))
    formats.add_to(benchmarks.add_parser("formats", help="what formats of 8 bits gain and cost"))
    verify.add_to(benchmarks.add_parser("verify", help="the time of a step that verifies drafts"))
    tune.add_to(benchmarks.add_parser("tune", help="the fastest kernels for a model's decode steps"))
    campaign.add_to(benchmarks.add_parser("campaign", help="all records of this GPU, at one commit"))
    given = parser.parse_args(argv)
    given.run(given)


if __name__ == "__main__":
    raise SystemExit(main())
