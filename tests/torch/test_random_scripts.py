"""Random programs: tensors, views, streams, frees, copies. They agree with a plain run on the CPU,
and
are met with silence, because they wait where they must."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.bfloat16, torch.int64]
index = st.integers(0, 7)

# One step of a program: what, and which tensors (modulo how many there are).
steps = st.one_of(
    st.tuples(st.just("new"), st.integers(1, 40), st.sampled_from(DTYPES)),
    st.tuples(st.sampled_from(["add_", "mul", "cat", "copy_"]), index, index),
    st.tuples(st.sampled_from(["half", "transpose", "flip", "to float", "clone"]), index),
    st.tuples(st.sampled_from(["there and back", "pinned", "free"]), index),
    st.tuples(st.just("stream"), st.integers(0, 2)),
    st.tuples(st.just("fill_"), index, st.integers(-3, 3)),
)


class Program:
    """The same program here and there."""

    def __init__(self):
        self.pairs = [(torch.arange(12).view(3, 4).float(),) * 2]
        self.pairs = [(a, b.cuda()) for a, b in self.pairs]
        self.streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self.current = 0

    def pick(self, i):
        return self.pairs[i % len(self.pairs)]

    def keep(self, here, there):
        if len(self.pairs) < 8:
            self.pairs.append((here, there))

    def step(self, what, *rest):
        getattr(self, what.replace(" ", "_").rstrip("_"))(*rest)

    def new(self, n, dtype):
        here = torch.arange(n).remainder(7).to(dtype)
        self.keep(here, here.cuda())

    def _two(self, i, j, function):
        (a, x), (b, y) = self.pick(i), self.pick(j)
        if a.shape == b.shape:
            self.keep(function(a, b), function(x, y))

    def add(self, i, j):
        (a, x), (b, y) = self.pick(i), self.pick(j)
        if a.shape == b.shape and torch.can_cast(b.dtype, a.dtype):
            a.add_(b.clone())  # a view may overlap itself: the answer must not depend on the order
            x.add_(y.clone())

    def mul(self, i, j):
        self._two(i, j, lambda a, b: a * b)

    def cat(self, i, j):
        self._two(i, j, lambda a, b: torch.cat([a, b]))

    def copy(self, i, j):
        (a, x), (b, y) = self.pick(i), self.pick(j)
        if a.shape == b.shape:
            a.copy_(b.clone())
            x.copy_(y.clone())

    def half(self, i):
        a, x = self.pick(i)
        if a.dim() and a.shape[0] > 1:
            n = a.shape[0] // 2
            self.keep(a[:n], x[:n])

    def transpose(self, i):
        a, x = self.pick(i)
        if a.dim() == 2:
            self.keep(a.t(), x.t())

    def flip(self, i):
        a, x = self.pick(i)
        self.keep(a.flip(0), x.flip(0))

    def to_float(self, i):
        a, x = self.pick(i)
        self.keep(a.float(), x.float())

    def clone(self, i):
        a, x = self.pick(i)
        self.keep(a.clone(), x.clone())

    def fill(self, i, value):
        a, x = self.pick(i)
        a.fill_(value)
        x.fill_(value)

    def there_and_back(self, i):
        a, x = self.pick(i)
        self.keep(a.clone(), x.cpu().cuda())

    def pinned(self, i):
        a, x = self.pick(i)
        buffer = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        buffer.copy_(x, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        self.keep(a.clone(), buffer.to("cuda", non_blocking=True))

    def free(self, i):
        if len(self.pairs) > 1:
            self.pairs.pop(i % len(self.pairs))

    def stream(self, i):
        before, self.current = self.streams[self.current], i
        self.streams[i].wait_stream(before)
        torch.cuda.set_stream(self.streams[i])
        for _, x in self.pairs:
            x.record_stream(self.streams[i])


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(steps, max_size=30))
def test_a_random_program_does_what_it_does_on_the_cpu(script):
    program = Program()
    try:
        for step in script:
            program.step(*step)
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
    for here, there in program.pairs:
        assert torch.equal(there.cpu(), here)
