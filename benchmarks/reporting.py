"""What the scripts here share: the options for their output, and the output."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parser_for(documentation: str | None) -> argparse.ArgumentParser:
    """A parser whose description is a script's first line, with --json and --out."""
    parser = argparse.ArgumentParser(description=(documentation or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    return parser


def give(
    report: dict[str, Any], arguments: argparse.Namespace, show: Callable[[dict[str, Any]], None]
) -> None:
    """Write and print a report as the options say."""
    text = json.dumps(report, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    if arguments.json:
        print(text)
    else:
        show(report)
