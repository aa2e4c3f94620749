#!/usr/bin/env python
"""Measure what makes rollouts fast, on real servers of this machine, variants alternating.

    python benchmarks/bench_rollout.py speculation --json out.json     suffix speculation against a plain server
    python benchmarks/bench_rollout.py placement --json out.json       policies of placement, two scarce caches

Each measurement is a module of benchmarks/rollout/; `--help` after its name says what it does and takes.
Exit status: 0 done, 1 a target was missed or a server failed, 2 a setting must be mended.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rollout import placement, speculation
from benchmarks.rollout.serving import machine
from megathunder.errors import MegathunderError, UserError
from megathunder.metrics.output_file import output_file

MEASUREMENTS = {"speculation": speculation, "placement": placement}


def main(argv: list[str]) -> int:
    """Run one measurement and write its JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_subparsers(dest="measurement", required=True)
    for name, module in MEASUREMENTS.items():
        options = chosen.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        options.add_argument("--json", required=True, type=Path, help="where the raw numbers go")
        module.add_options(options)
    arguments = parser.parse_args(argv)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    try:
        output_file(arguments.json)
        result, met = MEASUREMENTS[arguments.measurement].measure(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MegathunderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report = {"machine": machine(), "settings": settings, **result}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
