"""Which modules' weights come and go together.

A unit is what is waited for, and what a copy brings: large enough that the cost of going in and out
of it does not show, small enough that two of them are little memory. A transformer's block is one;
so is a run of small layers. They are chosen from the module tree alone; what a pass then shows
comes back here: that a child is never called, because its parent reads its weights, as `atomic`
(modules that are not looked into); that what is in a module is called without it, as `opened`
(modules that are).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ebbtide._offload.memory import is_its_bytes

MIB = 1 << 20

# PyTorch's own modules read their children's weights as they like, but for these.
TRANSPARENT = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)

PARTS = 24  # a unit is no larger than this part of the model, if that can be
# Small layers are gathered to a run until it is this part of the model; very small ones, of which
# many make no such part, to more, for what they do leaves the host little time: until they are a
# lot, or a larger part.
RUN_PARTS, LOT_PARTS, FEW_PARTS = 64, 20, 12
# Where the whole model fits, blocks are gathered, too: nothing has to come, and to go in and out is
# all that it costs. Not to one: what is in use cannot give way.
COARSE_PARTS = 8
MANY, LOT = 16, 160  # members of a run


@dataclass(eq=False)
class Choice:
    """A unit to be: the modules at whose calls it is entered, in order, and whose weights it
    has."""

    members: list[nn.Module]
    names: list[str]
    bytes: int
    # Weights of the member itself, without its children's, for as long as it runs.
    span: bool = False
    owners: list[nn.Module] = field(default_factory=list)  # modules that hold its weights

    @property
    def is_small(self) -> bool:
        """It is of many small layers: what each takes, on the GPU, is little."""
        return len(self.members) >= MANY

    @property
    def name(self) -> str:
        if len(self.names) == 1:
            return self.names[0] or "(model)"
        return f"{self.names[0]} .. {self.names[-1]}"


def choose(
    tops: Sequence[tuple[str, nn.Module]],
    size_of: Callable[[nn.Module], int],
    calls: list[str] | None = None,
    *,
    coarse: bool = False,
    atomic: frozenset[str] = frozenset(),
    opened: frozenset[str] = frozenset(),
    starts: frozenset[str] = frozenset(),
    apart: Collection[str] = frozenset(),
) -> list[Choice]:
    """The units of a model, or of what is left of one, in the order in which they run. `size_of`
    says how many bytes of weights a module has by itself; `calls`, once that is known, in which
    order modules were called; `coarse`, that units may be large. By their names: `atomic`, those
    that are not looked into, and `opened`, those that are in any case; `starts`, those that are the
    first of a run, and `apart`, those that are in none."""
    sizes: dict[nn.Module, int] = {}
    measured: set[nn.Module] = set()
    total = sum(_measure(top, size_of, sizes, measured) for _, top in tops)
    cap = max(total // PARTS, MIB)
    parts = [COARSE_PARTS] * 3 if coarse else [RUN_PARTS, FEW_PARTS, LOT_PARTS]
    target = [max(total // count, MIB) for count in parts]
    seen: set[nn.Module] = set()
    choices = [
        choice
        for name, top in tops
        for choice in _walk(top, name, cap, sizes, size_of, atomic, opened, seen)
    ]
    if calls is None:
        return _gather(choices, target, starts, apart)
    first = {name: at for at, name in reversed(list(enumerate(calls)))}

    def when(choice: Choice) -> int | None:
        """Its own place, or that of what it is in: whoever tells the order may name that."""
        name = choice.names[0]
        while name not in first and "." in name:
            name = name.rpartition(".")[0]
        return first.get(name)

    called = [c for c in choices if c.span or when(c) is not None]
    called.sort(key=lambda c: -1 if (at := when(c)) is None else at)
    # What was called again in between is no part of a run.
    again = {name for name in first if calls.count(name) > 1}.union(apart)
    never = [c for c in choices if not c.span and when(c) is None]
    return _gather(called, target, starts, again) + never


def _measure(
    module: nn.Module,
    size_of: Callable[[nn.Module], int],
    sizes: dict[nn.Module, int],
    seen: set[nn.Module],
) -> int:
    """Bytes of a module and everything in it, each module counted where it is met first."""
    if module in seen:
        return 0
    seen.add(module)
    total = size_of(module)
    for child in module.children():
        total += _measure(child, size_of, sizes, seen)
    sizes[module] = total
    return total


def has_forward(module: nn.Module) -> bool:
    """Whether it is called at all: a ModuleList, or a bare Module, only has others in it."""
    own = module.__dict__.get("forward", type(module).forward)
    return getattr(own, "__func__", own) is not nn.Module.forward


def _opaque(module: nn.Module) -> bool:
    """Whether it may read its children's weights without calling them."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, TRANSPARENT)


def _walk(
    module: nn.Module,
    name: str,
    cap: int,
    sizes: dict[nn.Module, int],
    size_of: Callable[[nn.Module], int],
    atomic: frozenset[str],
    opened: frozenset[str],
    seen: set[nn.Module],
) -> Iterator[Choice]:
    if module in seen or not sizes[module]:
        return
    seen.add(module)
    heavy = [(n, c) for n, c in module.named_children() if sizes.get(c) and c not in seen]
    own = size_of(module)
    closed = has_forward(module) and name not in opened
    if not heavy or (closed and (sizes[module] <= cap or _opaque(module) or name in atomic)):
        owners = [m for m in module.modules() if size_of(m)]
        seen.update(module.modules())
        yield Choice([module], [name], sizes[module], owners=owners)
        return
    if own:
        yield Choice([module], [name], own, span=True, owners=[module])
    for child_name, child in heavy:
        full = f"{name}.{child_name}" if name else child_name
        yield from _walk(child, full, cap, sizes, size_of, atomic, opened, seen)


def _gather(
    choices: list[Choice],
    target: Sequence[int],
    starts: frozenset[str],
    alone: Collection[str] = frozenset(),
) -> list[Choice]:
    """Those that follow one another become one, until it is of a good size: that of a few, of many
    small ones, or of a lot."""
    done: list[Choice] = []
    run: Choice | None = None
    for choice in choices:
        if choice.span or choice.names[0] in alone:
            run = None
            done.append(choice)
            continue
        if run is None or choice.names[0] in starts:
            run = Choice([], [], 0)
            done.append(run)
        run.members += choice.members
        run.names += choice.names
        run.owners += choice.owners
        run.bytes += choice.bytes
        count = len(run.members)
        if run.bytes >= target[(count >= MANY) + (count >= LOT)]:
            run = None
    return done


def is_plain(tensor: torch.Tensor) -> bool:
    """A tensor that is its memory and nothing else: what can be paged."""
    kinds = (torch.Tensor, nn.Parameter, getattr(nn, "Buffer", nn.Parameter))
    return (
        type(tensor) in kinds
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not tensor.is_quantized
        and is_its_bytes(tensor)
        and tensor.device.type in ("cpu", "cuda")
    )


def gives_nothing_away(module: nn.Module) -> bool:
    """Whether it is known that its results are no parts of its weights: PyTorch's own layers
    compute what they return."""
    return all(type(m).__module__.startswith("torch.nn.modules.") for m in module.modules())
