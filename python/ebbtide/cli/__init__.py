"""The command line: one module for each command, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import ebbtide

COMMANDS = {
    "info": "what Ebbtide finds on this machine, and in its simulated GPU",
    "demo": "models larger than the VRAM, on your GPU or a simulated one",
    "tour": "a short tour of the simulated GPU",
    "run": "a program on a simulated GPU: ebbtide run --sim 8GiB train.py",
}
ABOUT = "A VRAM allocator for PyTorch: what VRAM is behind the addresses that PyTorch hands out."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status. Wrong arguments end the program with status 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["run"]:  # most of its arguments are another program's
        return importlib.import_module("ebbtide.cli.run").main(words[1:])
    parser = argparse.ArgumentParser(prog="ebbtide", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"ebbtide {ebbtide.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    command = parser.parse_args(words).command
    return importlib.import_module(f"ebbtide.cli.{command}").main() or 0
