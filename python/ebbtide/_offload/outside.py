"""Weights that were read while their units were not entered: by whom, as far as that shows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from torch import nn

from ebbtide._offload import units
from ebbtide._offload.gates import Gate
from ebbtide._offload.learned import Patience
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


def passed_by(
    units_: Iterable[Unit],
    names: Mapping[nn.Module, str],
    touched: Collection[int],
    learning: bool,
    called: Collection[str],
) -> set[str]:
    """Members of units that were not entered, though what is in them was read: that is called
    without them, by another method than forward(), say. Within runs, only the first one is known
    not to have been entered, once their order is."""
    found: set[str] = set()
    for unit in units_:
        read = _touched(unit, names, touched)
        gated = unit.names[:1] if unit.run and not learning else unit.names
        missing = [n for n in gated if n not in called] if read else ()
        found.update(n for n in missing if any(r.startswith(f"{n}.") for r in read))
    return found


class Readers:
    """What is known of those who read weights of units that they are not in."""

    def __init__(self) -> None:
        self.atomic: frozenset[str] = frozenset()  # modules that read what is in them: units
        # Modules that were passed by: what is in them are units, and that stays so.
        self.opened: frozenset[str] = frozenset()
        self.starts: frozenset[str] = frozenset()  # modules that are the first of a run
        self._read: set[str] = set()  # modules whose weights somebody else has read
        self._refuted: set[str] = set()  # modules that were taken for such, and are none
        self._bypassed = Patience(1)  # with units whose gates are not where they were

    def has_read(self, unit: Unit) -> bool:
        """Whether somebody has read weights of a run, between calls of its members."""
        read = self._read
        return bool(read) and any(f"{r}.".startswith(f"{n}.") for n in unit.names for r in read)

    def nobody(self) -> None:
        """A pass in which there were none."""
        self._bypassed.is_over(False)

    def see(
        self,
        units_: Sequence[Unit],
        names: Mapping[nn.Module, str],
        touched: Collection[int],
        learning: bool,
        room: int,
        called: Collection[str] | None,
    ) -> Literal["", "plan", "learn"]:
        """A pass in which these pieces were read, with so much room for weights, and these modules
        were entered, if that is known: what there is to be done."""
        around = bypassed(units_, names, touched, learning)
        if self._bypassed.is_over(bool(around)):
            return "plan"  # the gates will be around what is there now
        if called is not None:
            gated = [u for u in units_ if u not in around]
            if found := passed_by(gated, names, touched, learning, called) - self.opened:
                self.opened |= found
                self.atomic -= found
                return "learn"
        runs = [u for u in units_ if u.run and not learning and u not in around]
        if found := missed(runs, names, touched, self.starts) - self.starts:
            self.starts |= found
            return "plan"
        for unit in units_:
            self._read.update(_touched(unit, names, touched) if unit not in around else ())
        if any(u.run and not u.closes and self.has_read(u) for u in units_):
            return "plan"  # between two of its members nothing is shown any more
        others = [u for u in units_ if u not in runs and u not in around]
        known = self._refuted | self.opened
        found, wrong = readers(others, names, touched, known, most(units_, room))
        self._refuted |= wrong & self.atomic
        atomic = (self.atomic | found) - self._refuted
        if atomic == self.atomic:
            return ""
        self.atomic = atomic
        return "learn"


def most(units_: Iterable[Unit], room: int) -> tuple[int, int]:
    """Bytes that a module may have, to be made a unit because it reads something that is in it, and
    because it reads most of that. Two of it have to leave as much again for others; or one of it
    a little."""
    largest = max((u.bytes for u in units_ if not u.span), default=0)
    return max(room // 3, largest), max(room * 4 // 5, largest)


def readers(
    others: Sequence[Unit],
    names: Mapping[nn.Module, str],
    touched: Collection[int],
    refuted: Collection[str],
    largest: tuple[int, int],
) -> tuple[set[str], set[str]]:
    """Modules that have read what is in modules below them, it seems: the nearest that is not in a
    unit, if it is not too large. And those that it seemed to be, but they were units, or in one,
    and yet nobody was in it who read."""
    by_name = {name: module for module, name in names.items()}
    found: set[str] = set()
    others_: set[str] = set()
    for unit in others:
        for name in _touched(unit, names, touched):
            for up in _above(name, by_name):
                if any(f"{up}.".startswith(f"{member}.") for member in unit.names):
                    others_.add(up)
                elif up not in refuted:
                    size, read = _bytes(up, others, names, touched)
                    if size <= largest[2 * read >= size]:
                        found.add(up)
                    break
    return found, others_


def _above(name: str, by_name: Mapping[str, nn.Module]) -> Iterator[str]:
    """The modules that one is in, from the nearest, but for the root, and those that are not
    called."""
    while name := name.rpartition(".")[0]:
        module = by_name.get(name)
        if module is None or units.has_forward(module):
            yield name


def _bytes(
    name: str, units_: Iterable[Unit], names: Mapping[nn.Module, str], touched: Collection[int]
) -> tuple[int, int]:
    """How much is in a module, and how much of it was read."""
    sizes: dict[int, int] = {}
    for b in (b for unit in units_ for b in unit.bindings):
        module = b.module()
        if module in names and f"{names[module]}.".startswith(f"{name}."):
            sizes[id(b.piece)] = b.piece.nbytes
    return sum(sizes.values()), sum(sizes[key] for key in sizes.keys() & set(touched))


def _touched(unit: Unit, names: Mapping[nn.Module, str], touched: Collection[int]) -> list[str]:
    """Names of the modules whose weights were read, of a unit's."""
    modules = [b.module() for b in unit.bindings if id(b.piece) in touched]
    return [names[module] for module in modules if module in names]
