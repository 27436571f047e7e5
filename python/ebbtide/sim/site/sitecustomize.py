"""Python runs this first of all in every process of a simulated run: the folder is on PYTHONPATH.

It joins the run, then lets a sitecustomize that was there without us have its turn.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [p for p in sys.path if os.path.abspath(p or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("EBBTIDE_SIM_RUN"):
    try:
        from ebbtide.sim.launch import join

        join()
    except Exception as error:
        print(f"ebbtide: no simulated GPU in this process: {error}", file=sys.stderr)
_next()
