"""Weights that were read while their units were not entered: by whom, as far as that shows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import nn

from ebbtide._offload import units
from ebbtide._offload.gates import Gate
from ebbtide._offload.unit import Unit


def bypassed(
    units_: Iterable[Unit], names: Mapping[nn.Module, str], touched: Collection[int], learning: bool
) -> list[Unit]:
    """Units with a member into which our gate does not lead any more: somebody has put another
    forward() in its place."""
    by_name = {name: module for module, name in names.items()}
    found = []
    for unit in units_:
        if not _touched(unit, names, touched):
            continue
        gated = unit.names if learning else (unit.names[0], unit.names[-1])
        gates = [by_name[n].__dict__.get("forward") for n in gated if n in by_name]
        if not all(isinstance(gate, Gate) and gate.unit is unit for gate in gates):
            found.append(unit)
    return found


def missed(
    runs: Iterable[Unit],
    names: Mapping[nn.Module, str],
    touched: Collection[int],
    starts: Collection[str],
) -> set[str]:
    """Members of runs that were not entered. Only the first one of a run enters it, once their
    order is known: so the pass went another way, and these are to be the first ones of runs."""
    found: set[str] = set()
    for unit in runs:
        read = _touched(unit, names, touched)
        within = [n for n in unit.names if any(f"{r}.".startswith(f"{n}.") for r in read)]
        # If it happens again, none of them waits for another.
        found.update(within if unit.names[0] in starts else within[:1])
    return found


def readers(
    others: Iterable[Unit], names: Mapping[nn.Module, str], touched: Collection[int]
) -> set[str]:
    """Modules that have read what is in modules below them."""
    by_name = {name: module for module, name in names.items()}
    found: set[str] = set()
    for unit in others:
        for name in _touched(unit, names, touched):
            name = name.rpartition(".")[0]
            while name and isinstance(by_name.get(name), units.NEVER_CALLED):
                name = name.rpartition(".")[0]
            found.add(name)
    return found


def _touched(unit: Unit, names: Mapping[nn.Module, str], touched: Collection[int]) -> list[str]:
    """Names of the modules whose weights were read, of a unit's."""
    modules = [b.module() for b in unit.bindings if id(b.piece) in touched]
    return [names[module] for module in modules if module in names]
