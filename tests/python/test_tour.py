"""python -m ebbtide tour: the tour ends well wherever it is shown, and badly if it was untrue."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.cells import cell_len

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7])(?:;\d+)*m")

# The pauses are for people. What they would have come to is printed instead.
HASTY = """
import sys, time
slept = []
time.sleep = slept.append
from ebbtide.cli import main
code = main(["tour"])
print("slept", sum(slept))
sys.exit(code)
"""


# As where PyTorch is not installed.
WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
from ebbtide.cli import main
sys.exit(main(["tour"]))
"""


@pytest.fixture(scope="module")
def before():
    """What was shown already, by its environment: importing PyTorch takes seconds."""
    return {}


@pytest.fixture
def shown(python, monkeypatch, before):
    """What the tour writes into a pipe, and its exit code; as on a machine without our settings."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "EBBTIDE_SIM_FAIL"):
        monkeypatch.delenv(name, raising=False)

    def run(again: bool = False, **environment: str) -> tuple[str, int]:
        key = tuple(sorted(environment.items()))
        if again or key not in before:
            done = python("-m", "ebbtide", "tour", **{"PYTHONIOENCODING": "utf-8", **environment})
            assert done.stderr == ""
            before[key] = (done.stdout, done.returncode)
        return before[key]

    return run


def in_terminal(**environment: str) -> tuple[str, int]:
    """The same in a terminal of 80 columns."""
    keep = ("PATH", "PYTHONPATH", "HOME")
    inherited = {name: os.environ[name] for name in keep if name in os.environ}
    settings = {"TERM": "xterm-256color", "PYTHONUTF8": "1", **inherited, **environment}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", HASTY], stdin=theirs, stdout=theirs, stderr=theirs, env=settings
    ) as child:
        os.close(theirs)
        output = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError as error:  # how Linux says that the other side is closed
                assert error.errno == errno.EIO
                break
            if not piece:
                break
            output += piece
        os.close(ours)
    return output.decode(), child.returncode


def lines(text: str) -> list[str]:
    return re.split(r"[\r\n]+", ESCAPE.sub("", text))


def widest(text: str) -> int:
    return max(cell_len(line) for line in lines(text))


def test_into_a_pipe_it_is_plain_text_of_80_columns(shown):
    text, code = shown()
    assert code == 0
    assert "\x1b" not in text
    assert widest(text) <= 80
    for number in range(1, 9):
        assert re.search(rf"^ {number}  \w", text, re.MULTILINE)
    assert "✗" not in text
    assert int(re.search(r"(\d+) statements, all true", text)[1]) == text.count("✓")


def test_the_hazard_names_both_sides_and_what_to_do(shown):
    text, _ = shown()
    report = re.search(r"╭─+ hazard: unmap ─+╮\n(.*?)╰", text, re.DOTALL)[1]
    words = " ".join(report.replace("│", " ").split())
    side = r"\[0x[0-9a-f]+, \+\d+\) \(at [\d.]+ ms, thread \d+\)"
    assert re.search(rf"cuMemUnmap on the host takes away {side}", words)
    assert re.search(rf"cuMemcpyHtoDAsync on stream \d+ of device 0 writes {side}", words)
    assert "Wait for an event" in words
    assert re.search(
        r"first cuMemcpyHtoDAsync stream \d+ of device 0 writes 32 MiB [\d.]+ ms", words
    )
    assert re.search(r"second cuMemUnmap the host takes 32 MiB [\d.]+ ms", words)


def test_the_code_that_is_shown_is_the_code_that_ran(shown):
    text, _ = shown()
    assert re.search(r"^ +card\.unmap\(page, staging\.bytes\) *$", text, re.MULTILINE)
    assert "fence.record(stream).synchronize()" in text


def test_pytorch_trains_on_the_card(shown):
    act = shown()[0].partition(" PyTorch runs on it ")[2]
    assert "$ ebbtide run --sim 64MiB" in act
    words = " ".join(act.split())
    falls = re.search(r"the loss falls from ([\d.]+) to ([\d.]+) in 18 steps", words)
    assert float(falls[2]) < float(falls[1]) / 2
    assert "✓ a batch of 128 is too many: torch.OutOfMemoryError, caught" in words
    assert re.search(
        r"✓ every loss and all [\d,]+ weights are equal to the CPU's, to the bit", words
    )
    assert "✓ 0 hazards" in words


def test_its_memory_over_time_is_drawn_to_scale(shown):
    rows = re.findall(r"^ *(?:64 MiB|0|)┤ (.*)$", shown()[0], re.MULTILINE)
    assert len(rows) == 7
    assert rows[0].strip() == "!"  # the batch that was too large, and nothing else up there
    assert re.match("[▁-█]+$", rows[-1].strip())
    failed = rows[0].index("!")
    width = max(len(row) for row in rows)
    heights = [sum(row[c : c + 1] not in ("", " ") for row in rows) for c in range(width)]
    assert max(heights[:failed]) < 7  # the card was never full before
    assert heights[failed + 3] == 1  # everything was given back
    assert max(heights[failed + 4 :]) > 1  # and training went on


def test_without_pytorch_that_act_is_skipped_and_says_so(python):
    done = python("-c", WITHOUT_TORCH, PYTHONIOENCODING="utf-8", COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    act = done.stdout.partition(" PyTorch runs on it ")[2]
    (line,) = [line for line in act.splitlines() if "skipped:" in line]
    assert "PyTorch is not installed" in line
    assert "18 statements, all true, 1 act skipped" in done.stdout


def test_a_training_run_that_breaks_off_is_not_shown_as_one_that_went_well(python):
    broken = """
import sys
from ebbtide.cli import tour
tour.Program.COMMAND = ("run", "--sim", "64MiB", "-c", "no-such-card")
sys.exit(tour.main())
"""
    done = python("-c", broken, PYTHONIOENCODING="utf-8", COLUMNS="80")
    assert done.returncode == 1
    assert "✗ this was not to happen: the program ended with 2" in done.stdout


def test_it_is_the_same_every_time_but_for_addresses_and_the_wall(shown):
    def essence(text: str) -> str:
        text = re.sub(
            r"0x[0-9a-f]+|thread \d+|at [\d.]+ ms|[\d.]+ (ms|s) on\s|\d+\.\d{3} ms", "", text
        )
        return " ".join(re.sub(r"[│─╭╮╰╯]", "", text).split())

    assert essence(shown()[0]) == essence(shown(again=True)[0])


def test_a_wide_terminal_does_not_make_long_lines(shown):
    assert widest(shown(COLUMNS="200")[0]) <= 80


@pytest.mark.parametrize("columns", ["60", "30"])
def test_a_narrow_one_is_kept_to(shown, columns):
    text, code = shown(COLUMNS=columns)
    assert code == 0
    assert widest(text) <= int(columns)


def test_where_only_ascii_can_be_written_it_is_ascii(shown):
    text, code = shown(PYTHONIOENCODING="ascii")
    assert code == 0
    assert text.isascii()
    assert "[--0" in text
    assert "ok the census is empty" in text


def test_in_a_terminal_it_is_coloured_and_takes_its_time():
    text, code = in_terminal()
    assert code == 0, text
    assert COLOUR.search(text)
    assert widest(text) <= 80
    assert "all true" in text
    assert 5 < float(re.search(r"slept ([\d.]+)", text)[1]) < 20


def test_without_colour_if_somebody_prefers_that():
    text, code = in_terminal(NO_COLOR="1")
    assert code == 0, text
    assert not COLOUR.search(text)
    assert "cuMemUnmap" in text


def test_a_terminal_that_can_do_nothing_is_not_animated():
    text, code = in_terminal(TERM="dumb")
    assert code == 0, text
    assert "\x1b" not in text
    assert "all true" in text


@pytest.mark.parametrize("call", ["cuMemMap:50:2", "cuMemcpyHtoDAsync:9:999", "cuEventRecord:5:1"])
def test_it_fails_and_says_so_if_something_was_not_as_told(shown, call):
    text, code = shown(EBBTIDE_SIM_FAIL=call)
    assert code == 1
    assert f"this was not to happen: {call.split(':')[0]} gave" in text
    assert "not true" in text


def test_it_is_alone_whatever_run_others_share(shown, tmp_path):
    run = tmp_path / "run"
    text, code = shown(EBBTIDE_SIM_RUN=str(run), EBBTIDE_SIM="1GiB", EBBTIDE_SIM_HAZARD="abort")
    assert code == 0, text
    assert not run.exists()
