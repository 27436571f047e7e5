"""python -m ebbtide demo, and examples/*.py: true wherever they are shown, or they fail."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from ebbtide.cli._stage import Stage

# As where PyTorch is not installed.
WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
from ebbtide.cli import main
sys.exit(main(["demo"]))
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "EBBTIDE_SIM_FAIL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def before():
    """What was shown already: a demo takes seconds."""
    return {}


@pytest.fixture
def shown(python, before):
    """What the demo writes into a pipe, and its exit code."""

    def run(**environment: str) -> tuple[str, int]:
        key = tuple(sorted(environment.items()))
        if key not in before:
            done = python("-m", "ebbtide", "demo", **{"PYTHONIOENCODING": "utf-8", **environment})
            assert done.stderr == ""
            before[key] = (done.stdout, done.returncode)
        return before[key]

    return run


def maps(text, full="█", gone="·"):
    """Each model's map: its name, pages that are resident, all pages, and both in MiB as told."""
    pattern = rf"^ +(first|second) +([{full}{gone}]+) +(\d+) of (\d+) MiB$"
    return [
        (name, picture.count(full), len(picture), int(resident), int(size))
        for name, picture, resident, size in re.findall(pattern, text, re.MULTILINE)
    ]


def table(text):
    pattern = r"^ +((?:first|second), pass \d) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) MiB *$"
    return {name: [int(n) for n in rest] for name, *rest in re.findall(pattern, text, re.MULTILINE)}


def test_into_a_pipe_it_is_plain_text_of_80_columns(shown):
    text, code = shown()
    assert code == 0, text
    assert "\x1b" not in text
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    for number in range(1, 5):
        assert re.search(rf"^ {number}  \w", text, re.MULTILINE)
    assert "✗" not in text
    assert int(re.search(r"(\d+) statements, all true", text)[1]) == text.count("✓") == 17
    assert "0 hazards" in text
    assert "docs/offload.md, examples/offload.py" in text


def test_the_maps_show_what_the_figures_say(shown):
    text, _ = shown()
    found = maps(text)
    assert len(found) == 2 * 1 + 4 * 2  # one for each model there is, in each of six passes
    for name, resident, pages, shown_resident, shown_size in found:
        assert (shown_resident, shown_size) == (32 * resident, 32 * pages)
        assert pages == {"first": 18, "second": 4}[name]
    assert [m[1] for m in found if m[0] == "first"] == [12, 12, 8, 8, 12, 12]
    assert [m[1] for m in found if m[0] == "second"] == [4, 4, 0, 0]
    assert re.findall(r"held +(\d+) of 384 MiB", text) == ["384"] * 6


def test_the_table_adds_up(shown):
    rows = table(shown()[0])
    assert list(rows) == [
        *("first, pass 1", "first, pass 2", "second, pass 1"),
        *("first, pass 3", "first, pass 4", "first, pass 5"),
    ]
    for name, (hits, loads, offloaded, evictions, moved) in rows.items():
        assert hits + loads + offloaded == (4 if name.startswith("second") else 18)
        assert moved == 32 * (loads + offloaded)  # what was a hit was not moved
        assert evictions <= loads
    frames = re.search(r"(\d+) frames were made .*?, (\d+)\s+times", shown()[0], re.DOTALL)
    assert int(frames[1]) * 32 == 384
    assert int(frames[2]) == sum(row[3] for row in rows.values())


def test_where_only_ascii_can_be_written_it_is_ascii_and_keeps_to_a_narrow_terminal(shown):
    text, code = shown(PYTHONIOENCODING="ascii", COLUMNS="60")
    assert code == 0, text
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= 60
    assert [m[1] for m in maps(text, "#", ".") if m[0] == "first"] == [12, 12, 8, 8, 12, 12]
    assert len(re.findall("^  ok ", text, re.MULTILINE)) == 17


def test_it_fails_and_says_so_if_something_was_not_as_told(shown):
    text, code = shown(EBBTIDE_SIM_FAIL="cuMemMap:5:1")
    assert code == 1
    assert "✗ this was not to happen: a call of the CUDA driver failed: cuMemMap" in text
    assert "not true" in text and "all true" not in text


def test_without_pytorch_it_says_so_in_a_line(python):
    done = python("-c", WITHOUT_TORCH)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "PyTorch is not installed" in line and "ebbtide tour" in line


def test_one_untrue_statement_is_enough(capsys):
    stage = Stage()
    stage.holds(True, "so it is")
    stage.holds(False, "so it is not")
    stage.holds(True, "so it is")
    assert stage.end("more", "") == 1
    assert "1 of 3 statements were not true" in capsys.readouterr().out


def test_the_example(python, repository):
    example = str(repository / "examples" / "vbar.py")
    done = python("-m", "ebbtide", "run", "--sim", "1GiB", example)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines == [
        "pass 0: [########....] 0 hits, 8 loads",
        "pass 1: [########....] 8 hits, 8 loads",
        "pass 2: [########....] 16 hits, 8 loads",
        "the same by hand: True",
    ]


def test_the_example_of_attach(python, repository):
    example = str(repository / "examples" / "attach.py")
    done = python("-m", "ebbtide", "run", "--sim", "1GiB", example)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "a small batch      : [########] within the limit: True",
        "a large tensor     : [####....] within the limit: True",
        "the result is the same: True",
        "and again: True",
        "the tensor is freed: [########] within the limit: True",
        "what is larger than the limit is out of memory",
    ]
