"""ebbtide run --sim 8GiB script.py ...: a program on a simulated GPU, otherwise as it is without.

The program replaces this process (exec), so that its exit code, signals, arguments, __main__ and
tracebacks are its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ebbtide run",
        description="Run a Python program, and its child processes, on a simulated GPU.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--sim", metavar="MEMORY", nargs="?", const="", help="memory of each card: 8GiB, 512MiB"
    )
    parser.add_argument("--card", help="a real card's figures: rtx4090, t4, a100 ...")
    parser.add_argument("--devices", type=int, default=1, help="how many cards")
    parser.add_argument("--clock", choices=["real", "virtual"], default="real")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m")
    parser.add_argument("script", nargs="?", help="the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    return parser


def _fail(message: str) -> NoReturn:
    print(f"ebbtide run: {message}", file=sys.stderr)
    raise SystemExit(2)


def main(arguments: Sequence[str]) -> int:
    """Never returns when all is well: the program takes over."""
    options = _parser().parse_args(_protect(arguments))
    if options.sim is None and options.card is None:
        _fail("say which GPU: --sim 8GiB, or --card rtx4090")
    if options.module is not None:
        rest = [word for word in (options.script, *options.arguments) if word is not None]
        program = ["-m", options.module, *rest]
    elif options.script is None:
        _fail("which program?")
    elif not Path(options.script).is_file():
        _fail(f"there is no file {options.script}")
    else:
        program = [options.script, *options.arguments]
    from ebbtide.sim.launch import OWNER, CannotStart, environment, prepare_run

    try:
        name = prepare_run(options.sim or None, options.devices, options.card, options.clock)
    except (CannotStart, ValueError) as error:
        _fail(str(error))
    added = {**environment(name), OWNER: str(os.getpid())}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *program], {**os.environ, **added})


def _protect(arguments: Sequence[str]) -> list[str]:
    """The program's own options are not ours: everything after it is an argument."""
    words = list(arguments)
    takes_value = {"--sim", "--card", "--devices", "--clock", "-m"}
    i = 0
    while i < len(words):
        word = words[i]
        if word == "-m":
            return [*words[: i + 2], "--", *words[i + 2 :]] if i + 1 < len(words) else words
        if word in takes_value:
            i += 2
        elif word.startswith("-"):
            i += 1
        else:
            return [*words[:i], "--", *words[i:]]
    return words
