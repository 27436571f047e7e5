"""Weights at rest: tensors that report the GPU and have no memory there.

Between uses, a module of an offloaded model holds a Parked tensor in the place of each weight.
Whatever is done with it is right: an operator that reads it gets its values on the GPU, in a
temporary; one that writes it writes the weight; a view of it is parked too, and writing that writes
the weight. It is slow, because every operator brings the values anew: the way it is meant to be
used is through the module it belongs to, which has real tensors in their places while it runs
(model.py).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ebbtide import _core
from ebbtide._offload.given import Given
from ebbtide._offload.memory import extent, flat, is_its_bytes, read_as, regions

if TYPE_CHECKING:
    from ebbtide._offload.model import Model

aten = torch.ops.aten

NO_ADDRESS = (
    "this weight is offloaded and has no address of its own between uses: use it through its "
    "module, or take a copy (.clone())"
)

IN_A_GRAPH = (
    "this weight is offloaded and not in use: a CUDA graph would copy it from the host for ever. "
    "Run the model once before it is captured; exclude() what is read without its module's call"
)

KEEPS_SIZE = "an offloaded weight keeps its size: assign a new parameter"


class Piece:
    """Bytes on the host: what one or more parked tensors look at."""

    __slots__ = (
        "__weakref__",
        "device",
        "given",
        "host",
        "left",
        "loan",
        "models",
        "nbytes",
    )

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        self.host = _apart(host)  # bytes, one dimension
        self.nbytes = host.numel()
        self.device = device
        self.models: weakref.WeakSet[Model] = weakref.WeakSet()  # whose weight it is
        self.given: Given | None = None  # to whoever has asked for a state_dict()
        self.left = False  # where the file is that it is no part of any more
        self.loan: Any = None  # a file's: not to be written

    def __reduce__(self) -> Any:
        """A weight in use has it among its attributes. A copy that a forward makes needs none."""
        return type(None), ()

    def move(self, place: torch.Tensor) -> None:
        """To another place on the host, with its values."""
        with torch.no_grad():
            place.copy_(self.host)
        self.host = _apart(place)

    def view(
        self,
        dtype: torch.dtype,
        size: Any,
        stride: Any,
        offset: int,
        conj: bool = False,
        neg: bool = False,
        *,
        of: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A tensor over its bytes on the host, or over those of `of`. The rest is as in park()."""
        base, item = self._bytes() if of is None else of, dtype.itemsize
        start = base.storage_offset()
        if start % item:
            raise RuntimeError(f"bytes at {start} cannot be read as {dtype}")
        whole = base[: base.numel() // item * item].view(dtype)
        # A view, not another tensor over the same memory: writing it changes the bytes' version.
        return read_as(whole.as_strided(size, stride, start // item + offset).detach(), conj, neg)

    def _bytes(self) -> torch.Tensor:
        """What others hold of it, if they do: PyTorch looks whether what it copies overlaps."""
        given = self.given
        return self.host if given is None or not given.is_held else given.bytes()

    @property
    def source(self) -> int:
        """Where the GPU copies it from."""
        return int(self.host.data_ptr()) + (self.loan.shift if self.loan is not None else 0)

    def still(self) -> contextlib.ExitStack:
        """No other thread writes to it meanwhile, or tells the GPU to read it."""
        locks = contextlib.ExitStack()
        for model in list(self.models):  # all on one GPU, and so of one lock
            locks.enter_context(model.lock)
        return locks

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """It changes meanwhile. The GPU has read what it was told to by then, and no copy that was
        made of it counts afterwards."""
        self.come_to()
        with self.still():
            torch.cuda.synchronize(self.device)
            if self.loan is not None:
                with torch.inference_mode(False):
                    self.host = self.host.clone()
                self.given = None
                self._end_loan()
            try:
                yield
            finally:
                self.changed()

    def come_to(self) -> None:
        """Somebody wants its bytes: a run that this thread is in lets go of them."""
        for model in list(self.models):
            model.comes_to(self)

    def _end_loan(self) -> None:
        self.loan = None
        self.replaced()

    def replaced(self) -> None:
        """It is in another place, or a weight that was here is: its model is planned anew."""
        for model in list(self.models):
            model.dirty()

    def changed(self) -> None:
        """Its bytes are others: no copy of them counts."""
        for model in list(self.models):
            model.forget(self)

    def give(self) -> torch.Tensor:
        """Its bytes, for somebody to keep. Under the lock."""
        if not self.nbytes:
            return self.host
        self.look()
        if self.given is None:
            self.given = Given(self.host)
        return self.given.bytes()

    def look(self) -> None:
        """Has somebody to whom it was given written to it? It may be nobody's any more."""
        self.come_to()
        given = self.given
        if given is None or (given.is_held and not given.is_written):
            return
        with self.still():
            if self.given is not given:
                return  # another thread has just looked
            if not given.is_held:
                self.given = None
                if self.left:
                    self.left = False
                    self.replaced()
            if given.is_written:
                given.see()
                if self.loan is not None and self.loan.shift:
                    self.left = self.given is not None  # it stays until nobody holds it
                    self._end_loan()  # what the file has is not what was written
                self.changed()


def _apart(host: torch.Tensor) -> torch.Tensor:
    """The same bytes, with a version of their own: it tells of writes to these alone."""
    with torch.inference_mode(False):
        return flat(host.untyped_storage(), *extent(host))


class Address:
    """Where a parked tensor begins: the same for those that begin together, which is how libraries
    find weights that are tied. It is no number."""

    __slots__ = ("_at",)

    def __init__(self, tensor: Parked) -> None:
        self._at = (tensor._piece, tensor.storage_offset() * tensor.dtype.itemsize)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._at == other._at

    def __hash__(self) -> int:
        return hash(self._at)

    def __index__(self) -> int:
        raise RuntimeError(NO_ADDRESS)


class Parked(torch.Tensor):
    """A weight at rest. Made by park()."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    _piece: Piece
    # isinstance(tensor, nn.Parameter) asks for this. That of a parameter is its own, and goes with
    # its content when tensors are swapped.
    _is_param = False

    # ---- what it looks like from outside ----

    @property
    def data(self) -> torch.Tensor:
        """Itself without its gradient's history; writing it writes the weight."""
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, torch.Tensor):
            raise TypeError(f"data is a tensor, not {new!r}")
        same = (new.shape, new.dtype) == (self.shape, self.dtype)
        if same and new.device.type == "cpu" and _moving():
            with torch.no_grad():
                self.copy_(new)
            for model in list(self._piece.models):
                model.move_away(self)
            return
        # Whoever has looked at its memory goes on to see that, and not what comes now.
        _look_at(self, *_bytes_of(new, self.device))

    @property
    def requires_grad(self) -> bool:
        return torch.Tensor.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        torch.Tensor.requires_grad.__set__(self, wanted)
        for model in list(self._piece.models):
            model.wants(self)

    def requires_grad_(self, requires_grad: bool = True) -> Parked:
        self.requires_grad = requires_grad
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """torch.utils.swap_tensors(), which .half() may call and load_state_dict(), exchanges what
        two tensors are, attribute by attribute: nobody else tells that a weight is another one."""
        if name == "__dict__":
            for content in (self.__dict__, value):
                if "_piece" in content:
                    content["_piece"].replaced()
        super().__setattr__(name, value)

    def data_ptr(self) -> Any:
        return Address(self)

    def untyped_storage(self) -> Any:
        raise RuntimeError(
            "this weight is offloaded and has no storage on the GPU: take a .clone()"
        )

    def storage(self) -> Any:
        return self.untyped_storage()

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        return self.untyped_storage()

    def tolist(self) -> Any:
        return host_of(self).tolist()

    def pin_memory(self, *_: Any) -> torch.Tensor:
        raise RuntimeError("only CPU tensors can be pinned, and this one reports the GPU")

    def share_memory_(self) -> Any:
        raise RuntimeError("an offloaded weight cannot be shared between processes")

    def __copy__(self) -> Parked:
        """Another tensor over the same bytes, as a plain one's copy is."""
        copied = park(
            self._piece,
            *geometry(self),
            parameter=self._is_param,
            requires_grad=self.requires_grad,
        )
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Parked:
        if id(self) in memo:
            return memo[id(self)]
        piece = memo.get(id(self._piece))
        if piece is None:
            piece = Piece(self._piece.host.clone(), self._piece.device)
            memo[id(self._piece)] = piece
        copied = park(
            piece,
            *geometry(self),
            parameter=self._is_param,
            requires_grad=self.requires_grad,
        )
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by its values, as a tensor of the CPU: who reads it may have no GPU."""
        values = host_of(self).clone()
        if self._is_param:
            return torch.nn.Parameter(values, self.requires_grad).__reduce_ex__(protocol)
        return values.__reduce_ex__(protocol)

    # ---- operators ----

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # In inference mode operators come as they are called, before they are made of others: one
        # that may give a view, or a copy (.contiguous(), .to()), is neither yet.
        if torch.is_inference_mode_enabled() and func._can_decompose():
            made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if func is aten.copy_.default and isinstance(args[0], Parked):
            return _copy(*args)
        if func is aten._to_copy.default:
            made = _to_copy(args[0], **kwargs)
            if made is not None:
                return made
        if func is aten.set_.source_Tensor or func._schema.name == "aten::set_":
            raise RuntimeError("an offloaded weight's memory is not replaced: assign to .data")
        if func._schema.name in ("aten::resize_", "aten::resize_as_"):
            raise RuntimeError(KEEPS_SIZE)
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], Parked):
            return _view_in_place(func, args, kwargs)
        if _is_view(func) and isinstance(args[0], Parked):
            return _views(func, args, kwargs)
        return _run(func, args, kwargs)


def _moving() -> bool:
    """Whether it is nn.Module, in .cpu() or .to(), that assigns to a weight's .data."""
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code is Parked.__setattr__.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_code is torch.nn.Module._apply.__code__


def _look_at(tensor: Parked, piece: Piece, where: tuple[Any, ...]) -> None:
    """Let it be over other bytes, or in another way over the same."""
    old = tensor._piece
    torch.Tensor.data.__set__(tensor, park(piece, *where))
    tensor._piece = piece
    old.replaced()


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _views(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where in the weight the result is: asked of a tensor without memory, of the same shape."""
    base = args[0]

    def parked(t: Any) -> Any:
        return park(base._piece, *geometry(t)) if isinstance(t, torch.Tensor) else t

    return tree_map(parked, func(_without_memory(base), *args[1:], **kwargs))


def _view_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Parked:
    """It is itself in another place of the weight from now on (t_(), unsqueeze_())."""
    tensor = args[0]
    where = geometry(func(_without_memory(tensor), *args[1:], **kwargs))
    if where != geometry(tensor):
        _look_at(tensor, tensor._piece, where)
    return tensor


def _without_memory(tensor: Parked) -> torch.Tensor:
    storage = torch.UntypedStorage(tensor._piece.nbytes, device="meta")
    meta = torch.empty(0, dtype=tensor.dtype, device="meta")
    meta.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return read_as(meta, tensor.is_conj(), tensor.is_neg())


class _Loaded:
    """The values of parked tensors on the GPU, for one operator. Those that overlap do so here,
    too: what it writes through one of them is to be seen through the others."""

    def __init__(self, tensors: Iterable[Parked]) -> None:
        parked = {id(t): t for t in tensors}
        if parked and torch.cuda.is_current_stream_capturing():
            raise _core.Busy(IN_A_GRAPH)
        for t in parked.values():
            t._piece.look()
            for model in list(t._piece.models):
                model.touch(t._piece)
        found = regions(parked.values(), lambda t: id(t._piece))
        temporary: dict[int, torch.Tensor] = {}  # by region
        self.values: dict[int, torch.Tensor] = {}
        for key, t in parked.items():
            piece, region = t._piece, found[key]
            if id(region) not in temporary:
                part = piece.host[region.low : region.high]
                made = torch.empty(part.numel(), dtype=torch.uint8, device=piece.device)
                with piece.still():
                    temporary[id(region)] = made.copy_(part, non_blocking=True)
            dtype, size, stride, offset, *bits = geometry(t)
            offset -= region.low // dtype.itemsize
            self.values[key] = piece.view(
                dtype, size, stride, offset, *bits, of=temporary[id(region)]
            )

    def value(self, t: Any) -> Any:
        return self.values[id(t)] if isinstance(t, Parked) else t

    def write_back(self, t: Parked) -> None:
        """Its elements: what lies between them may be another's, and written as well."""
        value = self.values[id(t)]
        if value.size() != t.size():
            raise RuntimeError(KEEPS_SIZE)
        with t._piece.written():
            host_of(t, look=False).copy_(value)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any other operator. Parked arguments are replaced by temporaries with their values; those
    that the schema marks as written are copied back, and the result names the weight, not the
    temporary."""
    loaded = _Loaded(t for t in tree_leaves((args, kwargs)) if isinstance(t, Parked))
    written: dict[int, Parked] = {}  # by temporary
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for t in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(t, Parked):
                written[id(loaded.value(t))] = t
    mapped, options = tree_map(loaded.value, (args, kwargs))
    result = func(*mapped, **options)
    for t in written.values():
        loaded.write_back(t)
    return tree_map(lambda r: written.get(id(r), r), result) if written else result


def _copy(to: Parked, source: torch.Tensor, non_blocking: bool = False) -> Parked:
    """Into the weight, on the host: nothing goes to the GPU before it is used."""
    values = host_of(source) if isinstance(source, Parked) else source
    if not is_its_bytes(to):
        values = values.cpu()  # PyTorch fails to bring real ones from the GPU to where they go
    with to._piece.written():
        host_of(to, look=False).copy_(values)
    return to


def _to_copy(
    tensor: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    layout: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor | None:
    """To the CPU: a copy of the host's values. On the GPU: parked as well. None: something else."""
    if not isinstance(tensor, Parked) or layout not in (None, torch.strided):
        return None
    target = tensor.device if device is None else torch.device(device)
    options = {} if memory_format is None else {"memory_format": memory_format}
    if target.type == "cpu":
        return host_of(tensor).to(dtype=dtype or tensor.dtype, copy=True, **options)
    if target.type != "cuda" or target.index not in (None, tensor.device.index):
        return None
    converted = host_of(tensor).to(dtype=dtype or tensor.dtype, copy=True, **options)
    piece, where = _bytes_of(converted, tensor.device, fresh=True)
    return park(piece, *where)


def _bytes_of(
    tensor: torch.Tensor, device: torch.device, fresh: bool = False
) -> tuple[Piece, tuple[Any, ...]]:
    """The piece of a tensor's values, a copy unless it is fresh, and where in it they are."""
    if isinstance(tensor, Parked) and tensor.device == device:
        return tensor._piece, geometry(tensor)
    values = tensor.detach()
    if not fresh:
        values = values.to("cpu", copy=True).resolve_conj().resolve_neg()
    first, end = extent(values)
    item = values.dtype.itemsize
    part = flat(values.untyped_storage(), first * item, end * item)
    return Piece(part, device), (values.dtype, values.size(), values.stride(), 0)


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where in its memory a tensor is, and how that is read, as park() takes it."""
    where = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
    return *where, tensor.is_conj(), tensor.is_neg()


def park(
    piece: Piece,
    dtype: torch.dtype,
    size: Any,
    stride: Any,
    offset: int,
    conj: bool = False,
    neg: bool = False,
    *,
    parameter: bool = False,
    requires_grad: bool = False,
) -> Parked:
    """A tensor of this shape in a piece, counted in elements from its start. `conj`, `neg`: the
    bytes are its values' conjugates, or negatives."""
    with torch.inference_mode(False):
        made = torch.Tensor._make_wrapper_subclass(
            Parked,
            size,
            strides=stride,
            storage_offset=offset,
            dtype=dtype,
            device=piece.device,
            requires_grad=requires_grad,
        )
    torch._C._set_conj(made, conj)
    torch._C._set_neg(made, neg)
    _refuse_address(made)
    made._piece = piece
    if parameter:
        made._is_param = True
    return made


def _refuse_address(made: Parked) -> None:
    """Code in C++ does not go by __torch_dispatch__, nor by data_ptr() above, and would find a null
    pointer: there is an exception for it in its place."""
    if _say_no_address is not None:
        _say_no_address(torch.Tensor.untyped_storage(made)._cdata, NO_ADDRESS)
    else:  # before 2.8 or so: in PyTorch's own words
        torch._C._set_throw_on_mutable_data_ptr(made)


_say_no_address = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)


def host_of(tensor: Parked, look: bool = True) -> torch.Tensor:
    """The values of a parked tensor where they are, on the host."""
    if look:
        tensor._piece.look()
    return tensor._piece.view(*geometry(tensor))


def given_of(tensor: Parked) -> torch.Tensor:
    """The same, for somebody to keep. Under the lock."""
    with torch.inference_mode(False):  # a view, and not another tensor over the same memory
        return tensor._piece.view(*geometry(tensor), of=tensor._piece.give())
