"""ebbtide run --sim 8GiB script.py ...: a program on a simulated GPU, otherwise as it is without.

The program replaces this process (exec), so that its exit code, signals, arguments, __main__ and
tracebacks are its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# What each option takes, and an example of it.
VALUES = {
    "--sim": ("a size", "8GiB"),
    "--card": ("a card's name", "rtx4090"),
    "--devices": ("a number", "1"),
    "--clock": ("real or virtual", "real"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ebbtide run",
        usage="ebbtide run (--sim MEMORY | --card CARD) [options] (script | -m module) ...",
        description="Run a Python program, and its child processes, on a simulated GPU. Options go "
        "before the program; what comes after it are the program's own arguments.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--sim",
        metavar="MEMORY",
        help="memory of each card: 8GiB, 512MiB (default: that of --card)",
    )
    parser.add_argument(
        "--card", help="a real card's figures: rtx4090, t4, a100 ... (default: an H200's)"
    )
    parser.add_argument("--devices", type=int, default=1, help="how many cards (default: 1)")
    parser.add_argument(
        "--clock",
        choices=["real", "virtual"],
        default="real",
        help="virtual: time is modelled alone, and the same in every run (default: real)",
    )
    parser.add_argument("-m", metavar="MODULE", help="run a module, as python -m does")
    return parser


def _fail(message: str) -> NoReturn:
    print(f"ebbtide run: {message}", file=sys.stderr)
    raise SystemExit(2)


def main(arguments: Sequence[str]) -> int:
    """Never returns when all is well: the program takes over."""
    own, program = _split(arguments)
    options = _parser().parse_args(own)
    if options.sim is None and options.card is None:
        _refuse_late_options(program)
        _fail("say which GPU: --sim 8GiB, or --card rtx4090")
    _check_program(own, program)
    from ebbtide.sim.launch import OWNER, CannotStart, check, environment, prepare_run

    try:
        check()
        name = prepare_run(options.sim, options.devices, options.card, options.clock)
    except (CannotStart, ValueError) as error:
        _fail(str(error))
    added = {**environment(name), OWNER: str(os.getpid())}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *program], {**os.environ, **added})


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the program with its arguments, which are none of ours."""
    words = list(arguments)
    i = 0
    while i < len(words) and words[i].startswith("-"):
        if words[i] == "--":
            return words[:i], words[i + 1 :]
        if words[i].startswith("-m"):
            attached = [words[i][2:]] if words[i] != "-m" else []
            return words[:i], ["-m", *attached, *words[i + 1 :]]
        if words[i] in VALUES:
            _refuse_no_value(words[i], words[i + 1 :])
            i += 1
        i += 1
    return words[:i], words[i:]


def _refuse_no_value(option: str, rest: Sequence[str]) -> None:
    """The next word is another option, or the program: then a value was forgotten."""
    kind, example = VALUES[option]
    word = rest[0] if rest else ""
    if not word or word.endswith(".py") or re.match("-[^0-9]", word):
        _fail(f"{option} needs {kind}: {shlex.join([option, example, *rest])}")


def _refuse_late_options(program: Sequence[str]) -> None:
    """Nothing says which GPU, but something behind the program would."""
    for i, word in enumerate(program):
        option, _, value = word.partition("=")
        if option in ("--sim", "--card"):
            end = i + 1 if value else i + 2
            moved = [*program[i:end], *program[:i], *program[end:]]
            _fail(f"options go before the program: ebbtide run {shlex.join(moved)}")


def _check_program(own: Sequence[str], program: Sequence[str]) -> None:
    if not program:
        _fail("which program?")
    script, *rest = program
    if script == "-m":
        if not rest:
            _fail("-m needs a module: -m pytest")
    elif re.fullmatch(r"python[\d.]*", Path(script).name):
        _fail(f"give the script itself, without {script}: {_command(own, rest or ['script.py'])}")
    elif Path(script).is_dir():
        _fail(f"{script} is a folder: which program in it?")
    elif not Path(script).is_file():
        _fail(f"there is no file {script}")


def _command(own: Sequence[str], program: Sequence[str]) -> str:
    return shlex.join(["ebbtide", "run", *own, *program])
