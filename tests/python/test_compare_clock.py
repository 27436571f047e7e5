"""tools/compare-clock says where the virtual clock and a GPU disagree, and bench/offload_clock.py
gives it the clock's side."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

GOOD = {  # a case as bench/offload.py tells it; what is not compared is left out
    "step": 66.0,
    "share_of_bound": 98.0,
    "resident_step": 11.0,
    "resident_step_beside_copies": 11.5,
    "link_time": 64.7,
}


def lines(case: str = "llama_256_tokens_75%", **values: float) -> str:
    told = {f"{case}_{what}": value for what, value in {**GOOD, **values}.items()}
    told["llama_link"] = 55.4
    objects = [{"bench": "offload", "metric": m, "value": v, "unit": "?"} for m, v in told.items()]
    return "".join(json.dumps(each) + "\n" for each in objects)


def failed(case: str) -> str:
    return json.dumps({"metric": f"{case}_failed", "value": 1, "unit": "times"}) + "\n"


@pytest.fixture
def compare(repository, tmp_path):
    def run(*texts: str) -> subprocess.CompletedProcess:
        files = [tmp_path / name for name in ("gpu.jsonl", "clock.jsonl")]
        for file, text in zip(files, texts, strict=False):
            file.write_text(text)
        command = [sys.executable, repository / "tools" / "compare-clock", *files]
        return subprocess.run(command, capture_output=True, text=True)

    return run


def test_what_agrees_is_told_and_not_marked(compare):
    """Milliseconds may differ: only what has no unit is compared. So may the resident step."""
    times = {what: 3 * GOOD[what] for what in ("step", "link_time")}
    done = compare("# 1.0 s  llama\n" + lines(), lines(**times, share_of_bound=90.0))
    assert (done.returncode, done.stderr) == (0, "")
    *_, case, last = done.stdout.splitlines()
    shown = "llama 256 tokens 75 % 98.0 90.0 0.918 1.020 1.020 1.000 0.178 0.059 0.333"
    assert case.split() == shown.split()
    assert last == "1 cases: 0 disagree by more than 10%; 0 are only in one of the files"


@pytest.mark.parametrize(
    ("other", "ratio"),
    [
        ({"share_of_bound": 88.0}, "0.898*"),
        ({"share_of_bound": 108.0}, "1.102*"),
        ({"step": 73.0}, "1.106*"),
        ({"step": 59.0}, "0.894*"),
        ({"link_time": 73.0}, "0.886*"),
    ],
)
def test_what_differs_by_more_than_a_tenth_is_marked(compare, other, ratio):
    more = lines("dit_1_tokens_0%")
    done = compare(lines() + more, lines(**other) + more)
    assert done.returncode == 1
    *_, case, fine, last = done.stdout.splitlines()
    assert ratio in case.split()
    assert "*" not in fine
    assert last.startswith("2 cases: 1 disagree")


def test_a_failure_on_one_side_is_a_difference(compare):
    case = "linears_4096_tokens_0%"
    done = compare(lines() + failed(case), lines() + lines(case))
    assert done.returncode == 1
    assert "4096 tokens   0 %   failed on the GPU*" in done.stdout
    done = compare(lines() + failed(case), lines() + failed(case))
    assert done.returncode == 0
    assert "failed on the GPU and on the clock\n" in done.stdout


def test_cases_of_one_side_only_are_counted(compare):
    done = compare(lines() + lines("dit_1_tokens_50%"), lines() + lines("dit_1_tokens_25%"))
    assert done.returncode == 0
    assert done.stdout.endswith("2 are only in one of the files\n")


@pytest.mark.parametrize(
    ("gpu", "clock", "complaint"),
    [
        ("", lines(), "gpu.jsonl has no case"),
        (lines(), '{"metric": 1}\n', "clock.jsonl:1: not a line of bench/offload.py --json"),
        (lines(), "{not json\n", "clock.jsonl:1: not a line of bench/offload.py --json"),
        (lines(), lines(link_time=0.0), "_75%_link_time is not above 0"),
        (lines(), failed("dit_1_tokens_0%"), "no case in common"),
        (lines().replace("share_of_bound", "share"), lines(), "_75%_share_of_bound is missing"),
    ],
)
def test_wrong_input_is_one_clear_line(compare, gpu, clock, complaint):
    done = compare(gpu, clock)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_not_there(compare):
    done = compare(lines())
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_the_clock_is_told_the_hosts_time_and_gives_a_case(python, repository, tmp_path):
    like = tmp_path / "gpu.jsonl"
    like.write_text(lines("llama_1_tokens_75%", resident_step=23.4))
    program = str(repository / "bench" / "offload_clock.py")
    case = ["--part", "llama", "--tokens", "1", "--shares", "50"]
    done = python(program, "--json", *case, "--like", str(like))
    assert done.returncode == 0, done.stdout + done.stderr
    told = {each["metric"]: each["value"] for each in map(json.loads, done.stdout.splitlines())}
    assert told["llama_1_tokens_50%_resident_step"] == pytest.approx(23.4, rel=0.03)
    # Half of 128 MiB, or less by what the ring does not need of two units, of 4 MiB each.
    assert 56 <= told["llama_1_tokens_50%_streamed"] <= 64 * 1.02
    assert told["llama_1_tokens_50%_link_time"] == pytest.approx(131, rel=0.02)  # of 13.5 GiB
    assert told["llama_1_tokens_50%_share_of_bound"] >= 97
    assert told["llama_1_tokens_50%_bit_equal"] == 1
