"""python -m ebbtide demo: models larger than the VRAM, on the GPU, or on a simulated one.

The program that is shown is ebbtide.cli._story, the same in both cases.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import ebbtide

STORY = ["-m", "ebbtide.cli._story"]
SIMULATED = ["run", "--sim", "1GiB"]


def gpu_works() -> bool:
    """Whether this PyTorch can use a GPU here: asked in a process of its own, since asking makes a
    context."""
    try:
        ebbtide.probe()
    except ebbtide.Error:
        return False
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", ask], stderr=subprocess.DEVNULL).returncode == 0


def main() -> int:
    """Show it; 0 if everything was as told."""
    if importlib.util.find_spec("torch") is None:
        print("ebbtide demo: PyTorch is not installed; `ebbtide tour` needs none", file=sys.stderr)
        return 1
    # A run that others share is none of ours.
    os.environ.pop("EBBTIDE_SIM_RUN", None)
    words = STORY if gpu_works() else ["-m", "ebbtide", *SIMULATED, *STORY]
    try:
        return subprocess.run([sys.executable, *words]).returncode
    except KeyboardInterrupt:
        return 130
