"""PyTorch's database of operators: what agrees with the CPU keeps agreeing.

The first sample input of every operator; tests/python/opinfo.py by hand does more of them.
"""

from __future__ import annotations

import opinfo
import pytest
from opinfo_known import KNOWN

# Least numbers of operators that have a verdict: fewer, and the sweep would be looking away.
LEAST = {"float32": 660, "bfloat16": 530, "int64": 425}


@pytest.fixture(scope="module")
def verdicts():
    return opinfo.sweep(opinfo.DTYPES, samples=1, jobs=2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", opinfo.DTYPES)
def test_operators_agree_with_the_cpu(verdicts, dtype):
    of_dtype = [v for v in verdicts if v["dtype"] == dtype]
    new = {
        v["op"]: v["why"] for v in of_dtype if set(v["failed"]) - KNOWN.get(v["op"], (set(), ""))[0]
    }
    assert new == {}
    assert len(of_dtype) >= LEAST[dtype]
    # What is random by nature is found on the CPU alone. More of it would hide differences.
    assert sum(v["verdict"] == "random" for v in of_dtype) <= 40


def test_every_known_difference_has_its_cause():
    for failed, cause in KNOWN.values():
        assert cause
        assert all(f.split()[0] in ("differs", "cannot") for f in failed)
