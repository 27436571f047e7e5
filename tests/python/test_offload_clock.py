"""An offloaded model is as fast as link and card allow: on the virtual clock, to the microsecond.

Three kinds of model, on cards that stand as those of 8, 12 and 24 GB do to models of 16 GiB;
offload_clock.py says how. The clock knows driver calls, copies and kernels, and no time of
Python's.
"""

from __future__ import annotations

import json

import pytest

BAR = 97.0  # per cent of what the slower one of link and arithmetic allows


@pytest.mark.parametrize(
    ("card", "model"), [("rtx4060", "llama"), ("rtx4070", "dit"), ("rtx4090", "linears")]
)
def test_a_step_takes_as_long_as_the_link_or_the_arithmetic_needs(python, repository, card, model):
    program = repository / "tests" / "python" / "offload_clock.py"
    done = python(str(program), card, model)
    assert done.returncode == 0, done.stdout + done.stderr
    *cases, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert last == {"hazards": []}
    assert len(cases) == 12
    for case in cases:
        assert case["same"], case
        assert case["one_by_one"] == 0, case
        assert case["held"] <= case["limit"], case
        assert case["of_bound"] >= BAR, case
    # Both bounds are met with: the one that is about the link, and the one about arithmetic.
    assert any(case["link"] > 2 * case["resident_step"] for case in cases)
    assert any(case["resident_step"] > 2 * case["link"] for case in cases)


def test_the_ring_is_as_large_as_it_has_to_be(python, repository):
    done = python(str(repository / "tests" / "python" / "offload_ring.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert last == {"hazards": []}
    for line in lines:
        assert line["same"], line
        assert line["one_by_one"] == 0, line
        assert line["held"] <= line["limit"], line
    case = {line["what"]: line for line in lines}
    assert all(line["units"] == 24 for line in lines)
    # Whoever says so has two units.
    two, slow_card = case["two units"], case["two units, the card is slow"]
    assert two["ring"] == slow_card["ring"] == 2
    for name in ("the link is slow", "the link again"):
        assert case[name]["ring"] <= 1
        # Every byte that the ring has less need not come: 8 milliseconds for a unit.
        assert case[name]["step"] <= two["step"] - (2 - case[name]["ring"]) * 8 * 0.95
    assert case["the card is slow first"]["ring"] == case["the card is slow"]["ring"] == 2
    assert case["the card is slow"]["step"] <= slow_card["step"] * 1.001
    # What stays gives way to tensors: all of a unit has to come then. And two may be in use.
    assert case["tensors grow"]["ring"] >= 1
    assert case["two at once"]["ring"] == 2


def test_no_weight_is_late_when_passes_become_long(python, repository):
    done = python(str(repository / "tests" / "python" / "offload_sizes.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    short, long, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert last == {"hazards": []}
    assert short["one_by_one"] == long["one_by_one"] == 0
    # A ring that is smaller than two units pays, where it is the link that takes the time.
    assert short["ring"] < 2 and short["step"] < short["link"]
    assert long["step"] <= long["busy"] * 1.01
