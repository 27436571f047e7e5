"""PyTorch's operators on the simulated GPU.

Nothing can execute device code there, so every operator that has a CUDA kernel is redirected to the
CPU's kernel, on CPU tensors that alias the same memory (memory.py); results that are new become
CUDA
tensors from PyTorch's own CUDA allocator. Each redirected operator tells the simulated stream what
it
read and wrote and how long it would take (redirect.py, cost.py). A few operators have no CPU
kernel of
their own and are put together from others (attention.py, cudnn.py).

Importing this imports torch; `install()` is called once, right after PyTorch was imported in a
process
that has a simulated GPU.
"""

from ebbtide.sim.operators.install import install

__all__ = ["install"]
