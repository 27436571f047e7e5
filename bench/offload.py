"""How close an offloaded model comes to what the link and the GPU allow.

    python bench/offload.py [--json] [--part NAME ...]                            on a GPU
    ebbtide run --sim 4GiB --clock virtual bench/offload.py --small [--json]      on a simulated one

A model of which a share is resident cannot be faster than the bound: the larger of the time that
the link needs for the rest, and the time of a step of the resident model beside a bare loop that
copies as many bytes. Both are measured in the same run. The limit is what must be: the share, the
activations, and two of the largest units; the resident model lies beside it, for comparison, and is
not counted.

Figures are medians of rounds. In a round, a short step that was disturbed is tried again, and if
all tries were, the shortest counts, of every model alike. Where the host is all the bound, and
shared with others, they say how disturbed it was. The share of the host's time is then what to look
at: how much of it the resident model takes, of what the offloaded one takes, if both run by turns
of a few layers (offload_timing.Duet). It is told where the host seems to be the bound.

Parts: llama, dit, linears (shares of them resident); resident (all of it); accelerate; generate;
equals (what these measures say of two models that are the same).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import offload_models as models
import torch
from offload_timing import SHORT, Core, Duet, Link, Turns, empty, timed, used
from torch import nn

import ebbtide

MIB = 1 << 20
options: argparse.Namespace
failures = 0
began = time.perf_counter()


# ---- telling -------------------------------------------------------------------------------------


def tell(metric: str, value: float, unit: str) -> None:
    if options.json:
        line = {"bench": "offload", "metric": metric, "value": round(value, 4), "unit": unit}
        print(json.dumps(line), flush=True)
    else:
        print(f"  {metric:<52} {value:12.4f} {unit}", flush=True)


def say(words: str) -> None:
    """Progress, which is no result."""
    print(f"# {time.perf_counter() - began:6.1f} s  {words}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def case(name: str) -> Iterator[None]:
    """A failure is a result, too, and the others are still to come."""
    global failures
    try:
        yield
    except Exception as error:
        failures += 1
        traceback.print_exc()
        say(f"{name} FAILED: {type(error).__name__}: {error}")
        tell(f"{name}_failed", 1, "times")
        error.__traceback__ = None  # it holds tensors
    empty()


COLUMNS = (
    # metric, heading, unit, format
    ("step", "step", "ms", "9.3f"),
    ("bound", "bound", "ms", "9.3f"),
    ("share_of_bound", "of bound", "%", "8.1f"),
    ("share_of_the_hosts_time", "of host", "%", "8.1f"),
    ("resident_step", "resident", "ms", "9.3f"),
    ("resident_step_beside_copies", "beside", "ms", "9.3f"),
    ("link_time", "link", "ms", "9.3f"),
    ("streamed", "streamed", "MiB", "8.0f"),
    ("to_stream", "must", "MiB", "8.0f"),
    ("held", "held", "MiB", "8.0f"),
    ("held_by_the_drivers_count", "driver's", "MiB", "8.0f"),
    ("limit", "limit", "MiB", "8.0f"),
    ("bit_equal", "equal", "of 1", "5.0f"),
)


def heading(title: str) -> None:
    if options.json:
        return
    width = [int(form.split(".")[0]) for *_, form in COLUMNS]
    words = (f"{head:>{w}}" for (_, head, _, _), w in zip(COLUMNS, width, strict=True))
    print(f"\n{title}\n{'tokens':>7} {'share':>6} " + " ".join(words), flush=True)


def row(name: str, tokens: int, share: int, values: dict[str, float | None]) -> None:
    if options.json:
        for metric, _, unit, _ in COLUMNS:
            if (value := values[metric]) is not None:
                tell(f"{name}_{tokens}_tokens_{share}%_{metric}", value, unit)
    else:
        cells = (
            f"{'-':>{form.split('.')[0]}}" if values[metric] is None else f"{values[metric]:{form}}"
            for metric, _, _, form in COLUMNS
        )
        print(f"{tokens:>7} {share:>5}% " + " ".join(cells), flush=True)


# ---- cases ---------------------------------------------------------------------------------------


def make_link() -> Link:
    return Link(32 * MIB) if options.small else Link()


def take_turns(functions: dict[str, Callable[[], Any]], alone: Sequence[str] = ()) -> Turns:
    return Turns(functions, options.seconds, options.rounds or int(options.small), alone)


def flat(result: Any) -> list[torch.Tensor]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [t.detach().cpu() for t in tensors]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.int16), b.view(torch.int16))
        for a, b in zip(one, other, strict=True)
    )


class Plain:
    """The model as PyTorch has it, resident, and what it takes."""

    def __init__(self, kind: models.Kind) -> None:
        self.kind = kind
        unlimited()
        before = torch.cuda.memory_reserved()
        self.model = kind.make("cuda", in_one=True)
        empty()
        self.weights = models.weight_bytes(self.model)
        self.reserved = torch.cuda.memory_reserved() - before
        self.known: dict[int, list[torch.Tensor]] = {}

    def reference(self, inputs: tuple[torch.Tensor, ...], tokens: int) -> int:
        """Compute what is right, once; the most that PyTorch had."""
        empty()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            self.known[tokens] = flat(self.model(*inputs))
        return torch.cuda.max_memory_reserved()


def unlimited() -> None:
    """As if no model had been offloaded yet: no limit, and nothing kept for later."""
    empty()
    if ebbtide.is_attached():
        device = ebbtide.Device(0)
        with contextlib.suppress(ebbtide.Busy):
            device.limit = torch.cuda.memory_reserved()  # what is only kept goes
        device.limit = 1 << 62
        device.trim()


class Watch:
    """The most that is held, beyond what was there."""

    def __init__(self, base_held: int, base_used: int) -> None:
        self.base = base_held, base_used
        self.device = ebbtide.Device(0)
        self.held = self.used = 0

    def look(self) -> None:
        self.held = max(self.held, self.device.stats()["held"] - self.base[0])
        self.used = max(self.used, used() - self.base[1])


def on_share(link: Link, plain: Plain, share: int, tokens_list: list[int]) -> None:
    """One offloaded model, for all numbers of tokens."""
    kind = plain.kind
    model = kind.make("cpu")
    unlimited()
    base_held, base_used = torch.cuda.memory_reserved(), used()
    start = time.perf_counter()
    to_keep = share * plain.weights // 100
    handle = ebbtide.offload(model, limit=base_held + to_keep + plain.weights // 4)
    say(f"{kind.name} {share} %: offloaded in {time.perf_counter() - start:.1f} s")
    for tokens in tokens_list:
        with case(f"{kind.name}_{tokens}_tokens_{share}%"):
            on_tokens(link, plain, model, handle, share, tokens, (base_held, base_used))
    del model, handle
    unlimited()


def until_steady(handle: ebbtide.Offloaded) -> Iterator[None]:
    """So many passes, and more until the ring has been of one size for a while, not for ever."""
    few, rings = max(options.warm // 2, 1), []
    # On a processor like those that it is measured on: one that is half as fast takes another ring.
    with Core(tries=int(not options.small)) as core:
        for number in range(4 * options.warm):
            core.take()
            yield
            rings.append(handle.stats()["ring"])
            if number + 1 >= options.warm and len(set(rings[-few:])) == 1:
                return


def on_tokens(
    link: Link,
    plain: Plain,
    model: nn.Module,
    handle: ebbtide.Offloaded,
    share: int,
    tokens: int,
    base: tuple[int, int],
) -> None:
    kind, device = plain.kind, ebbtide.Device(0)
    inputs = kind.inputs(tokens)
    device.limit = 1 << 62  # for the plain model
    activations = plain.reference(inputs, tokens) - base[0]  # and the inputs
    empty()
    to_keep = share * plain.weights // 100
    to_stream = plain.weights - to_keep

    def set_limit() -> int:
        limit = to_keep + activations + 2 * handle.stats()["largest_unit"]
        limit = -(-limit // (2 * MIB)) * 2 * MIB
        with contextlib.suppress(ebbtide.Busy):  # the ring goes with the next pass
            device.limit = base[0] + limit
        return limit

    set_limit()
    watch = Watch(*base)
    for _ in until_steady(handle):
        model(*inputs)
        torch.cuda.synchronize()
        watch.look()
        limit = set_limit()  # units are as the first pass has shown them
    same = equal(flat(model(*inputs)), plain.known[tokens])
    before = handle.stats()["streamed"] + handle.stats()["filled"]
    counted = 0

    def offloaded() -> Any:
        nonlocal counted
        counted += 1
        return model(*inputs)

    def resident() -> Any:
        return plain.model(*inputs)

    functions = {
        "link_time": link.only(to_stream),
        "resident_step": resident,
        "resident_step_beside_copies": link.beside(resident, to_stream),
        "step": offloaded,
    }
    turns = take_turns(functions, alone=["resident_step"])
    watch.look()
    same = same and equal(flat(model(*inputs)), plain.known[tokens])
    stats = handle.stats()

    def bound(turn: dict[str, float]) -> float:
        return max(turn["link_time"], turn["resident_step_beside_copies"])

    def share_of_bound(turn: dict[str, float]) -> float:
        return bound(turn) / turn["step"] * 100

    ring = f"ring {stats['ring'] / MIB:.0f} MiB"
    say(f"{kind.name} {tokens} tokens {share} %: {turns.spread(share_of_bound)}; {ring}")
    values: dict[str, Any] = {
        **{name: turns.median(name) for name in functions},
        "bound": turns.median(bound),
        "share_of_bound": turns.median(share_of_bound),
        "share_of_the_hosts_time": None,
        "streamed": (stats["streamed"] + stats["filled"] - before) / (counted + 1) / MIB,
        "to_stream": to_stream / MIB,
        "held": watch.held / MIB,
        "held_by_the_drivers_count": watch.used / MIB,
        "limit": limit / MIB,
        "bit_equal": same,
    }
    busy = values["resident_step_beside_copies"]
    if values["link_time"] < busy < SHORT and not options.small:
        values["share_of_the_hosts_time"] = share_of_host(resident, offloaded)
    row(kind.name, tokens, share, values)
    if not same:
        raise AssertionError("the result is not the plain model's")
    if watch.held > limit:
        raise AssertionError(f"{watch.held - limit} bytes more are held than the limit allows")
    if stats["one_by_one"]:
        say(f"{kind.name}: {stats['one_by_one']} units had no room and came weight by weight")


def share_of_host(one: Callable[[], Any], other: Callable[[], Any]) -> float:
    """What one model takes of the host's time, in % of what another one takes."""
    duet = Duet(one, other)
    return duet.first / duet.second * 100


def shares_of(name: str) -> None:
    kind = models.kinds(options.small)[name]
    link = make_link()
    plain = Plain(kind)
    title = f"{name}: {plain.weights / MIB:.0f} MiB of weights, link {link.rate / 1e9:.2f} GB/s"
    heading(title)
    say(title)
    if options.json:
        tell(f"{name}_link", link.rate / 1e9, "GB/s")
        tell(f"{name}_weights", plain.weights / MIB, "MiB")
    for share in options.shares:
        with case(f"{name}_{share}%"):
            on_share(link, plain, share, options.tokens or kind.tokens)


# ---- all of it resident --------------------------------------------------------------------------


def measure_resident() -> None:
    for kind in models.kinds(options.small).values():
        with case(f"resident_{kind.name}"):
            resident_of(kind)


def resident_of(kind: models.Kind) -> None:
    plain = Plain(kind)
    model = kind.make("cpu")
    handle = ebbtide.offload(model)
    for tokens in (1, 16) if options.small else (1, 256):
        inputs = kind.inputs(tokens)
        plain.reference(inputs, tokens)
        for _ in range(options.warm):
            result = model(*inputs)
        same = equal(flat(result), plain.known[tokens])
        functions = {
            "plain": lambda inputs=inputs: plain.model(*inputs),
            "offloaded": lambda inputs=inputs: model(*inputs),
        }
        turns = take_turns(functions)

        def more(turn: dict[str, float]) -> float:
            return (turn["offloaded"] / turn["plain"] - 1) * 100

        stats = handle.stats()
        name = f"resident_{kind.name}_{tokens}_tokens"
        say(f"{name}: {turns.spread(more)}")
        tell(f"{name}_plain", turns.median("plain"), "ms")
        tell(f"{name}_offloaded", turns.median("offloaded"), "ms")
        tell(f"{name}_more", turns.median(more), "%")
        if not options.small:  # the clock knows no time of the host's but what it is told
            share = share_of_host(functions["plain"], functions["offloaded"])
            tell(f"{name}_more_of_the_hosts_time", (100 / share - 1) * 100, "%")
        tell(f"{name}_resident", stats["resident"] / stats["bytes"] * 100, "%")
        tell(f"{name}_bit_equal", same, "of 1")
        if not same:
            raise AssertionError("the result is not the plain model's")


def measure_equals() -> None:
    """Two plain models, of the kind that the host is all the bound of."""
    unlimited()
    kind = models.kinds(options.small)["linears"]
    one, other = (kind.make("cuda", in_one=True) for _ in range(2))
    for tokens in (1, 16) if options.small else (1, 4096):
        inputs = kind.inputs(tokens)
        functions = {
            "one": functools.partial(one, *inputs),
            "other": functools.partial(other, *inputs),
        }
        turns = take_turns(functions)

        def share(turn: dict[str, float]) -> float:
            return turn["one"] / turn["other"] * 100

        name = f"equals_{tokens}_tokens"
        say(f"{name}: {turns.spread(share)}")
        tell(f"{name}_step", turns.median("one"), "ms")
        tell(f"{name}_share", turns.median(share), "%")
        if not options.small:
            tell(f"{name}_share_of_the_hosts_time", share_of_host(**functions), "%")


# ---- what people use -----------------------------------------------------------------------------


def measure_accelerate() -> None:
    kind = models.kinds(options.small)["llama"]
    tokens = 16 if options.small else 256
    inputs = kind.inputs(tokens)
    plain = Plain(kind)
    empty()
    before = torch.cuda.memory_reserved()
    activations = plain.reference(inputs, tokens) - before
    known, weights = plain.known[tokens], plain.weights
    del plain
    ours = {share: ours_at(kind, share, inputs, known, weights, activations) for share in (50, 0)}
    for share, took in ours.items():
        tell(f"accelerate_ebbtide_{share}%_step", took, "ms")
    for name, share, run in (
        ("dispatch_model", 50, by_dispatch),
        ("cpu_offload", 0, by_cpu_offload),
        ("diffusers_group_offloading", 0, by_groups),
    ):
        with case(f"accelerate_{name}"):
            unlimited()
            try:
                model = run(kind, weights)
            except ImportError as error:
                say(f"{name} is skipped: {error}")
                continue
            same = equal(flat(model(*inputs)), known)
            step = functools.partial(model, *inputs)
            step()
            took = statistics.median(timed(step) for _ in range(3))
            tell(f"accelerate_{name}_{share}%_step", took, "ms")
            tell(f"accelerate_{name}_{share}%_times_ours", took / ours[share], "x")
            tell(f"accelerate_{name}_{share}%_bit_equal", same, "of 1")
        model = step = None


def ours_at(
    kind: models.Kind,
    share: int,
    inputs: tuple[torch.Tensor, ...],
    known: list[torch.Tensor],
    weights: int,
    activations: int,
) -> float:
    unlimited()
    base = torch.cuda.memory_reserved()
    model = kind.make("cpu")
    handle = ebbtide.offload(model, limit=base + share * weights // 100 + weights // 4)
    limit = base + share * weights // 100 + activations + 2 * handle.stats()["largest_unit"]
    with contextlib.suppress(ebbtide.Busy):  # the ring goes with the next pass
        ebbtide.Device(0).limit = limit
    for _ in until_steady(handle):
        model(*inputs)
        torch.cuda.synchronize()
    if not equal(flat(model(*inputs)), known):
        raise AssertionError("the result is not the plain model's")
    took = statistics.median(timed(lambda: model(*inputs), 5) for _ in range(3))
    told = {name: value / MIB for name, value in handle.stats().items() if value > MIB}
    say(f"ours at {share} %: {told}")
    return took


def by_dispatch(kind: models.Kind, weights: int) -> nn.Module:
    from accelerate import dispatch_model, infer_auto_device_map

    model = kind.make("cpu")
    most = {0: weights // 2, "cpu": 1 << 40}
    placed = infer_auto_device_map(model, most, no_split_module_classes=["LlamaBlock"])
    return dispatch_model(model, placed, main_device=0)


def by_cpu_offload(kind: models.Kind, weights: int) -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(kind.make("cpu"), execution_device=torch.device("cuda", 0))


def by_groups(kind: models.Kind, weights: int) -> nn.Module:
    from diffusers.hooks import apply_group_offloading

    model = kind.make("cpu")
    apply_group_offloading(
        model,
        onload_device=torch.device("cuda"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
    )
    return model


# ---- generate() ----------------------------------------------------------------------------------


def measure_generate() -> None:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        say(f"generate is skipped: {error}")
        return
    _, width, inner, heads, words = models.llama_sizes(options.small)
    count = 8 if options.small else 64
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=8,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=words,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )

    def make(device: str) -> Any:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        models.fill(model, device)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    torch.manual_seed(1)
    prompt = torch.randint(words, (1, 16)).cuda()

    def generate(model: Any, new: int = count) -> tuple[torch.Tensor, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
        )
        torch.cuda.synchronize()
        return ids.cpu(), new / (time.perf_counter() - start)

    unlimited()
    plain = make("cuda")
    weights = models.weight_bytes(plain)
    generate(plain, 4)
    empty()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    right, plain_rate = generate(plain)
    activations = torch.cuda.max_memory_reserved() - before
    del plain
    model = make("cpu")
    link = make_link()
    unlimited()
    base = torch.cuda.memory_reserved()
    handle = ebbtide.offload(model, limit=base + weights)
    limit = base + weights // 2 + activations + 2 * handle.stats()["largest_unit"]
    ebbtide.Device(0).limit = limit
    generate(model, 4)
    before = handle.stats()["streamed"]
    ids, rate = generate(model)
    streamed = handle.stats()["streamed"] - before
    tell("generate_plain", plain_rate, "tokens/s")
    tell("generate_50%", rate, "tokens/s")
    tell("generate_50%_at_most", link.rate / (weights / 2), "tokens/s")
    tell("generate_50%_streamed_for_each_token", streamed / count / MIB, "MiB")
    tell("generate_50%_same_tokens", torch.equal(ids, right), "of 1")
    if not torch.equal(ids, right):
        raise AssertionError("other tokens than the plain model's")


# --------------------------------------------------------------------------------------------------

PARTS = {
    "llama": lambda: shares_of("llama"),
    "dit": lambda: shares_of("dit"),
    "linears": lambda: shares_of("linears"),
    "resident": measure_resident,
    "accelerate": measure_accelerate,
    "generate": measure_generate,
    "equals": measure_equals,
}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.replace("%", "").split(",")]


def main() -> int:
    global options
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--small", action="store_true", help="less than 1 GiB of weights")
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--shares", type=numbers, default=[75, 50, 25, 0], help="in %%, by commas")
    parser.add_argument("--tokens", type=numbers, help="by commas")
    parser.add_argument(
        "--rounds", type=int, default=0, help="of which the median is told; 0: enough"
    )
    parser.add_argument("--seconds", type=float, default=9, help="for the rounds of a case")
    parser.add_argument("--warm", type=int, default=16, help="passes, at least, before it counts")
    options = parser.parse_args()
    torch.cuda.init()
    if options.small:
        torch.set_num_threads(1)  # small operators wait for one another otherwise
    with torch.no_grad():
        for name in options.part or PARTS:
            say(name)
            with case(name):
                PARTS[name]()
    tell("seconds", time.perf_counter() - began, "s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
