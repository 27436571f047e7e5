"""Operators of the database that do not agree with the CPU on the simulated GPU, and why.

Where the cause does not say otherwise it is so on a GPU too: nothing here hides a wrong result.
"""

from __future__ import annotations

# Operator: (the verdicts and what was done, cause). A failure that is not named here is new.
KNOWN: dict[str, tuple[set[str], str]] = {
    "narrow_copy": (
        {"cannot out=", "cannot out= resized"},
        "narrow_copy.out has a CPU kernel and no CUDA kernel",
    ),
    "nn.functional.scaled_dot_product_attention": (
        {"differs backward"},
        "where the mask has a gradient the CPU goes step by step, and a GPU's fused kernel, like "
        "what stands in for it, at once: the last bits",
    ),
    "renorm": (
        {"differs backward"},
        "the formula of the gradient sums in double for CPU tensors and in float for CUDA tensors "
        "(toAccumulateType in PyTorch's renorm_backward): the last bits",
    ),
    "sparse.mm.reduce": (
        {"cannot forward", "cannot backward"},
        "_sparse_mm_reduce_impl has a CPU kernel and no CUDA kernel",
    ),
    "tensor_split": (
        {"cannot forward", "cannot backward"},
        "indices given as a tensor must be on the CPU, and the sweep puts all tensors on the GPU",
    ),
}
