"""Planning: every unit its place in the VBAR, and a gate before every module that it is entered by.

The VBAR's start stays resident before its end. So first comes what is to stay in any case, then
what would stall a pass, then the rest, so that about as much of every unit stays (order.py).
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from ebbtide._offload import host, units
from ebbtide._offload.gates import Gate
from ebbtide._offload.order import share_out
from ebbtide._offload.parked import Piece
from ebbtide._offload.unit import Binding, Unit
from ebbtide.vbar import VBAR

if TYPE_CHECKING:
    from ebbtide._offload.model import Model

LOOK_UP = 16  # an embedding is kept before others if it is no more than this part of the model
LEVELS = 8  # about so many parts has a unit, of which some stay and some do not


def place(
    choices: list[units.Choice],
    bindings: dict[nn.Module, list[Binding]],
    pinned: list[str],
    fits: bool,
    runs_stay: bool,
) -> tuple[dict[int, int], int, int]:
    """By piece its offset in the VBAR; how large that is; and how much of it, at its start, is to
    stay whatever happens."""
    # What is to stay, what is needed all the time, and what nothing is computed with, so that
    # the link would have no time to bring it; then the rest, spread.
    firm = [c for c in choices if _is_pinned(c, pinned)]
    spans = [c for c in choices if c.span and c not in firm]
    most = sum(c.bytes for c in choices) // LOOK_UP
    looked_up = [
        c
        for c in choices
        if all(isinstance(m, nn.Embedding) for m in c.members)
        and c.bytes <= most
        and c not in firm
        and not c.span
    ]
    rest = [c for c in choices if c not in (*firm, *spans, *looked_up)]
    groups = [_pieces(c, bindings) for c in firm + spans + looked_up]
    parts = [_parts(_pieces(c, bindings), fits or (runs_stay and c.is_small)) for c in rest]
    sizes = [[sum(p.nbytes for p in part) for part in its] for its in parts]
    groups += [parts[unit][part] for unit, part in share_out(sizes, LEVELS)]
    offsets: dict[int, int] = {}
    at = kept = 0
    for number, group in enumerate(groups):
        for piece in group:
            if id(piece) not in offsets:
                offsets[id(piece)] = at
                at += host._up(piece.nbytes)
        if number < len(firm):
            kept = at
    return offsets, at, kept


def make_units(
    model: Model,
    choices: list[units.Choice],
    bindings: dict[nn.Module, list[Binding]],
    vbar: VBAR,
    offsets: dict[int, int],
) -> list[Unit]:
    """The units, each with its gates."""
    made = []
    times = Counter(id(p) for choice in choices for p in _pieces(choice, bindings))
    tied = {piece for piece, count in times.items() if count > 1}
    for choice in choices:
        held = [b for module in choice.owners for b in bindings[module]]
        unit = Unit(choice, vbar, held, offsets, tied, model.mover)
        unit.model = weakref.ref(model)
        unit.others_stay = model.runs_stay and choice.is_small
        made.append(unit)
    for choice, unit in zip(choices, made, strict=True):
        _put_gates(model, choice, unit)
    _find_shared(made)
    return made


def _pieces(choice: units.Choice, bindings: dict[nn.Module, list[Binding]]) -> list[Piece]:
    """A unit's, each once."""
    found = {id(b.piece): b.piece for module in choice.owners for b in bindings[module]}
    return list(found.values())


def _parts(pieces: list[Piece], whole: bool) -> list[list[Piece]]:
    """What of a unit stays together. If a part of every unit stays, rather than every so many
    units, the others come evenly, and more of them are in the ring. But to go into one of which
    all is there is cheaper: so where all of them stay; or most of those of many small layers, which
    leave the host no time, and the link enough."""
    if whole:
        return [pieces]
    target = sum(p.nbytes for p in pieces) // LEVELS
    parts: list[list[Piece]] = [[]]
    for piece in pieces:
        if sum(p.nbytes for p in parts[-1]) >= target:
            parts.append([])
        parts[-1].append(piece)
    return parts


def _is_pinned(choice: units.Choice, pinned: list[str]) -> bool:
    names = choice.names
    return any(not p or name == p or name.startswith(f"{p}.") for name in names for p in pinned)


def _put_gates(model: Model, choice: units.Choice, unit: Unit) -> None:
    last = len(choice.members) - 1
    unit.closes = last > 0
    for i, module in enumerate(choice.members):
        inside = not model.learning and 0 < i < last and choice.is_small
        if inside and model.shown and not model.needs_gate(choice.names[i], module, unit):
            unit.closes = False
            continue
        gate = module.__dict__.get("forward")
        if not isinstance(gate, Gate):
            gate = Gate(module, model, choice.names[i])
        model.gates.add(gate)  # also one that somebody took away and has put back
        gate.name = choice.names[i]
        gate.unit = unit
        gate.run = last > 0
        # Where members are called without the model, each may be the first.
        gate.enters = model.learning or model.rootless or i == 0
        gate.leaves = i == last
        gate.slow = True


def _find_shared(made: list[Unit]) -> None:
    """Tied weights: pieces of several units."""
    having: dict[int, list[Unit]] = {}
    for unit in made:
        for piece in unit.numbers:
            having.setdefault(piece, []).append(unit)
    for piece, several in having.items():
        for unit in several:
            unit.shared += [
                (unit.numbers[piece], weakref.ref(other), other.numbers[piece])
                for other in several
                if other is not unit
            ]
