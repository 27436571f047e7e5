"""offload(): any nn.Module, of any size, with one line. docs/offload.md tells the rest."""

from ebbtide._offload.handle import Offloaded, offload

__all__ = ["Offloaded", "offload"]
