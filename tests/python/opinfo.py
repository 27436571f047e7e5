"""PyTorch's own database of operators (OpInfo) on the simulated GPU, compared with the CPU.

    PYTHONPATH=build/release/python $(make -s env) tests/python/opinfo.py [--dtype float32]...
        [--samples 8] [--jobs 2] [--only REGEX] [--json FILE]

Every operator runs on its sample inputs, once on the CPU and once on the simulated GPU: forward,
in place, into out=, and backward where it is differentiable. Each gets one verdict per dtype:

    agree    equal to the bit, in values, shapes, strides, dtypes
    random   random or uninitialised by nature: shapes, strides and dtypes are equal
    differs  something is not equal
    cannot   it raises on the simulated GPU and not on the CPU

Operators run in worker processes, so that a crash or a hang of one is a verdict on that one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import re
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

DTYPES = ("float32", "bfloat16", "int64")
MORE_DTYPES = ("float16", "float64", "complex64", "bool", "uint8")  # when asked for
LIMIT = 60.0  # seconds for one operator in one dtype
# What these return is whatever the memory held.
UNINITIALISED = re.compile(r"(^|\.)(new_|_)?empty(_like|_strided|_permuted)?$|^resize_")
# On the CPU itself these write past the end of an out= of other strides.
CORRUPTS = {"tril", "triu"}
# Samples that are compared, where not all can be: a GPU has one of lstsq's drivers only, which is
# not the CPU's default. Dropout in attention would make all its samples random; tests/torch has it.
COMPARABLE: dict[str, Callable[[Any], bool]] = {
    "linalg.lstsq": lambda sample: sample.kwargs.get("driver") == "gels",
    "nn.functional.scaled_dot_product_attention": lambda sample: not sample.kwargs.get("dropout_p"),
}
MEMORY = "2GiB"


class Verdict(dict):  # type: ignore[type-arg]
    """One operator in one dtype: {"op", "dtype", "verdict", "why"}."""


# ---- in a worker ---------------------------------------------------------------------------------


def load() -> list[Any]:
    """The database. Its module wants `expecttest`, which nothing in it uses."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = object  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


def name_of(op: Any) -> str:
    return op.name + ("." + op.variant_test_name if op.variant_test_name else "")


class Disagreement(Exception):
    pass


class CannotRun(Exception):
    pass


def _flat(value: Any) -> list[Any]:
    from torch.utils._pytree import tree_flatten

    return tree_flatten(value)[0]


def _parts(tensor: Any) -> list[Any]:
    """The plain tensors that a tensor consists of."""
    import torch

    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _compare(what: str, cpu: Any, gpu: Any, values: bool) -> None:
    import torch

    left, right = _flat(cpu), _flat(gpu)
    if len(left) != len(right):
        raise Disagreement(f"{what}: {len(left)} results against {len(right)}")
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        here = f"{what}[{i}]" if len(left) > 1 else what
        if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
            raise Disagreement(f"{here}: {type(a).__name__} against {type(b).__name__}")
        if not isinstance(a, torch.Tensor):
            same = a == b or (isinstance(a, float) and a != a and b != b)
            if not same and values and not isinstance(a, torch.device):
                raise Disagreement(f"{here}: {a!r} against {b!r}")
            continue
        if a.layout != b.layout or a.shape != b.shape or a.dtype != b.dtype:
            raise Disagreement(
                f"{here}: {a.dtype} {list(a.shape)} {a.layout} against "
                f"{b.dtype} {list(b.shape)} {b.layout}"
            )
        for x, y in zip(_parts(a.detach()), _parts(b.detach()), strict=True):
            _compare_strided(here, x, y, values)


def _compare_strided(here: str, a: Any, b: Any, values: bool) -> None:
    import torch

    if a.stride() != b.stride() and a.numel() > 1:
        raise Disagreement(f"{here}: strides {a.stride()} against {b.stride()}")
    if not values:
        return
    a, b = (t.cpu().resolve_conj().resolve_neg() for t in (a, b))
    if a.is_floating_point():
        a, b = a.double(), b.double()
    if a.is_floating_point() or a.is_complex():
        equal = torch.allclose(a, b, 0, 0, equal_nan=True)
    else:
        equal = torch.equal(a, b)
    if not equal:
        worst = (a.to(torch.complex128) - b.to(torch.complex128)).abs().nan_to_num().max().item()
        raise Disagreement(f"{here}: values differ by up to {worst:.3g}")


def _differentiable(value: Any) -> list[Any]:
    import torch

    return [
        t
        for t in _flat(value)
        if isinstance(t, torch.Tensor) and t.requires_grad and t.layout == torch.strided
    ]


class Side:
    """One of the two runs: the sample on a device, the operator, its results and gradients."""

    def __init__(self, op: Any, sample: Any, device: str, dtype: Any, grad: bool) -> None:
        import torch
        from torch.utils._pytree import tree_map

        self.op, self.device, self.torch = op, device, torch

        def place(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                copy = value.detach().clone().to(device)
                return copy.requires_grad_(grad and value.requires_grad)
            if isinstance(value, torch.device) and value.type == "cpu":
                return torch.device(device)
            return device if isinstance(value, str) and value == "cpu" else value

        self.input = tree_map(place, sample.input)
        self.args = tree_map(place, sample.args)
        self.kwargs = tree_map(place, sample.kwargs)

    def inputs(self) -> list[Any]:
        return [
            t
            for t in _flat((self.input, self.args, self.kwargs))
            if isinstance(t, self.torch.Tensor)
        ]

    def forward(self, function: Callable[..., Any], seed: int = 0, **more: Any) -> Any:
        self.torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(self.input, *self.args, **self.kwargs, **more)

    def backward(self, result: Any) -> list[Any]:
        torch = self.torch
        outs = _differentiable(result)
        ins = [t for t in self.inputs() if t.requires_grad]
        if not outs or not ins:
            return []
        made = torch.Generator().manual_seed(7)
        grads = [torch.randn(o.shape, dtype=o.dtype, generator=made).to(o.device) for o in outs]
        got = torch.autograd.grad(outs, ins, grads, allow_unused=True)
        return [g for g in got if g is not None]


@contextlib.contextmanager
def _other_seeds(by: int) -> Iterator[None]:
    """Whoever seeds the generator within this gets another seed; the database does it, too."""
    import torch

    original = torch.manual_seed
    torch.manual_seed = lambda seed: original(seed + by)
    try:
        yield
    finally:
        torch.manual_seed = original


class Trial:
    """One operator in one dtype, sample by sample."""

    def __init__(self, op: Any, dtype: str, samples: int) -> None:
        import torch

        self.op, self.dtype, self.most = op, getattr(torch, dtype), samples
        self.uninitialised = bool(UNINITIALISED.search(op.name))
        self.random = False
        # "verdict action": the first reason, of those that differ or cannot run.
        self.failures: dict[str, str] = {}
        self.autograd = dtype == "float32" and op.supports_autograd

    def samples(self) -> Iterator[Any]:
        import itertools

        import torch

        torch.manual_seed(1)
        made = self.op.sample_inputs("cpu", self.dtype, requires_grad=self.autograd)
        if self.op.name in COMPARABLE:
            made = filter(COMPARABLE[self.op.name], made)
        yield from itertools.islice(made, self.most)

    def pair(self, sample: Any, grad: bool) -> tuple[Side, Side]:
        return (
            Side(self.op, sample, "cpu", self.dtype, grad),
            Side(self.op, sample, "cuda", self.dtype, grad),
        )

    def both(
        self, sample: Any, what: str, act: Callable[[Side], Any], grad: bool = False
    ) -> tuple[Any, Any] | None:
        """What an action gives on each side; None where the CPU cannot do it either."""
        cpu, gpu = self.pair(sample, grad)
        try:
            expected = act(cpu)
        except Exception:
            return None
        try:
            got = act(gpu)
            gpu.torch.cuda.synchronize()
            return expected, got
        except Exception as error:
            raise CannotRun(f"{what}: {' '.join(str(error).split())[:300]}") from error

    def is_random(self, sample: Any) -> bool:
        try:
            first = Side(self.op, sample, "cpu", self.dtype, False).forward(self.op, 0)
            for by in range(1, 5):  # few draws may be alike by chance
                with _other_seeds(by):
                    other = Side(self.op, sample, "cpu", self.dtype, False).forward(self.op, 0)
                _compare("", first, other, True)
        except Disagreement:
            return True
        except Exception:
            return False
        return False

    def run(self) -> int:
        """How many comparisons were made. What went wrong is in `failures`."""
        return sum(self.one(sample) for sample in self.samples())

    def one(self, sample: Any) -> int:
        # Each sample for itself: without dropout, say, an operator is not random.
        random = self.uninitialised or self.is_random(sample)
        self.random = self.random or random
        values = not random
        op = self.op

        def gradients(side: Side) -> Any:
            return side.backward(side.forward(op))

        def in_place(side: Side) -> Any:
            result = side.forward(op.inplace_variant)
            return result, side.inputs()

        def into(side: Side) -> Any:
            with side.torch.no_grad():
                result = side.forward(op)
                outs = _like(result, plain=op.name in CORRUPTS)
                side.forward(op, out=outs)
                return outs

        def into_empty(side: Side) -> Any:
            with side.torch.no_grad():
                outs = _like(side.forward(op), True)
                side.forward(op, out=outs)
                return outs

        actions: list[tuple[str, Callable[[Side], Any], bool]] = [
            ("forward", lambda side: (side.forward(op), side.inputs()), False)
        ]
        if self.autograd:
            actions.append(("backward", gradients, True))
        # In place on what must be broadcast is an error, or reads what nobody wrote.
        if op.inplace_variant is not None and not sample.broadcasts_input:
            actions.append(("in place", in_place, False))
        if op.supports_out:
            actions += [("out=", into, False), ("out= resized", into_empty, False)]
        tried = 0
        for what, act, grad in actions:
            try:
                got = self.both(sample, what, act, grad)
                if got is not None:
                    tried += 1
                    _compare(what, *got, values)
            except (Disagreement, CannotRun) as error:
                tried += 1
                verdict = "cannot" if isinstance(error, CannotRun) else "differs"
                self.failures.setdefault(f"{verdict} {what}", str(error))
        return tried


def _like(result: Any, empty: bool = False, plain: bool = False) -> Any:
    """Buffers for out=: of the result's shape but not its strides, or of no size."""
    import torch

    def one(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.layout != torch.strided:
            raise TypeError("not a tensor to write into")
        if empty:
            return torch.empty(0, dtype=t.dtype, device=t.device)
        if plain:
            return torch.zeros_like(t)
        return torch.zeros(t.shape[::-1], dtype=t.dtype, device=t.device).permute(
            *reversed(range(t.dim()))
        )

    if isinstance(result, torch.Tensor):
        return one(result)
    if isinstance(result, (list, tuple)):
        return tuple(one(t) for t in result)
    raise TypeError("not a tensor to write into")


def judge(op: Any, dtype: str, samples: int) -> Verdict | None:
    """The verdict on one operator in one dtype; None where the database has nothing to try."""
    import torch

    wanted = getattr(torch, dtype)
    if wanted not in op.supported_dtypes("cpu") or wanted not in op.supported_dtypes("cuda"):
        return None
    from ebbtide import sim

    trial = Trial(op, dtype, samples)
    verdict = Verdict(op=name_of(op), dtype=dtype, verdict="agree", why="", failed=[])
    before = sim.hazard_count()
    try:
        if trial.run() == 0:
            return None
        if trial.random:
            verdict["verdict"] = "random"
        failures = trial.failures
        if sim.hazard_count() != before:
            failures["differs hazards"] = f"{sim.hazard_count() - before} hazards"
    except Exception as error:  # a mistake of ours, on one operator
        failures = {"differs comparison": f"not compared: {error}"[:300]}
    if failures:
        worst = "differs" if any(f.startswith("differs") for f in failures) else "cannot"
        verdict.update(verdict=worst, why="; ".join(failures.values()), failed=list(failures))
    return verdict


def worker(pipe: Connection) -> None:
    """Answers (index, dtype, samples) with a verdict, until the pipe is closed."""
    from ebbtide import sim

    sim.start(memory=MEMORY)
    import torch

    torch.set_num_threads(1)
    sim.on_hazard("quiet")
    ops = load()
    pipe.send([name_of(op) for op in ops])
    while True:
        try:
            index, dtype, samples = pipe.recv()
        except EOFError:
            return
        started = time.monotonic()
        verdict = judge(ops[index], dtype, samples)
        if verdict is not None:
            verdict["seconds"] = round(time.monotonic() - started, 3)
        pipe.send(verdict)


# ---- in the parent -------------------------------------------------------------------------------


class Hand:
    """A worker process, started again when it crashed or hung."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=worker, args=(other,), daemon=True)
        self.process.start()
        other.close()
        if not self.pipe.poll(120):
            raise RuntimeError("a worker did not start")
        self.names = self.pipe.recv()

    def ask(self, index: int, dtype: str, samples: int) -> Verdict | None:
        why = "crashed"
        try:
            self.pipe.send((index, dtype, samples))
            if self.pipe.poll(LIMIT):
                return self.pipe.recv()
            why = f"did not end within {LIMIT:.0f} s"
        except (EOFError, ConnectionError):
            pass
        self.process.kill()
        self.process.join()
        verdict = Verdict(
            op=self.names[index], dtype=dtype, verdict="cannot", why=why, failed=[why]
        )
        self.start()
        return verdict

    def stop(self) -> None:
        self.pipe.close()
        self.process.join()


def sweep(
    dtypes: tuple[str, ...], samples: int, jobs: int, only: str = "", progress: bool = False
) -> list[Verdict]:
    """Every verdict, in the database's order."""
    hands = [Hand() for _ in range(jobs)]
    names = hands[0].names
    tasks = [(d, i) for d in dtypes for i in range(len(names)) if re.search(only, names[i])]
    queue = collections.deque(tasks)
    found: dict[tuple[str, int], Verdict] = {}

    def serve(hand: Hand) -> None:
        while True:
            try:
                dtype, index = queue.popleft()
            except IndexError:
                return
            verdict = hand.ask(index, dtype, samples)
            if verdict is not None:
                found[dtype, index] = verdict
            if progress and len(queue) % 50 == 0:
                print(f"\r{len(queue)} to go ", end="", file=sys.stderr, flush=True)

    threads = [threading.Thread(target=serve, args=(hand,)) for hand in hands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for hand in hands:
        hand.stop()
    return [found[task] for task in tasks if task in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", action="append", choices=DTYPES + MORE_DTYPES)
    parser.add_argument("--samples", type=int, default=8, help="sample inputs of each operator")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="a regular expression for operators' names")
    parser.add_argument("--json", help="a file for the verdicts, one a line")
    chosen = parser.parse_args()
    dtypes = tuple(chosen.dtype or DTYPES)
    started = time.monotonic()
    verdicts = sweep(dtypes, chosen.samples, chosen.jobs, chosen.only, sys.stderr.isatty())
    if chosen.json:
        with open(chosen.json, "w") as file:
            file.writelines(json.dumps(v) + "\n" for v in verdicts)
    for v in verdicts:
        if v["verdict"] in ("differs", "cannot"):
            print(f"{v['verdict']:8} {v['dtype']:9} {v['op']:45} {v['why']}")
    randoms = sorted({v["op"] for v in verdicts if v["verdict"] == "random"})
    print("random or uninitialised:", ", ".join(randoms))
    for dtype in dtypes:
        counts = collections.Counter(v["verdict"] for v in verdicts if v["dtype"] == dtype)
        total = sum(counts.values())
        row = "  ".join(f"{counts[k]:4} {k}" for k in ("agree", "random", "differs", "cannot"))
        print(f"{dtype:9} {total:4} operators: {row}")
    print(f"{time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
