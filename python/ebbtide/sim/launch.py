"""A simulated GPU for PyTorch: `start()` in a program, or `ebbtide run` around one.

Both prepare the same three things, and child processes inherit them through the environment:

    the cards       in a file of their own (EBBTIDE_SIM_RUN), shared by all processes of the run;
    the libraries   named as NVIDIA's and loaded before PyTorch asks for them;
    the operators   registered as soon as PyTorch has been imported.

Nothing here imports torch before the program does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal

from ebbtide import sizes
from ebbtide.sim._library import path as library_path
from ebbtide.sim.card import Figures, register
from ebbtide.sim.cards import card as card_of
from ebbtide.sim.control import clock as set_clock

RUN = "EBBTIDE_SIM_RUN"  # the file of the cards; set: this process belongs to a simulated run
OWNER = "EBBTIDE_SIM_OWNER"  # the process that removes it
GRANULARITY = 2 << 20
LEAST, MOST = 32 << 20, 64 << 40  # bytes of a card
OLDEST_TORCH = (2, 6)
# oneDNN computes the simulated GPU's products. Virtual machines may name AMX among what they can,
# and then stop a program that uses it: an illegal instruction. This is all but that. It has two
# names, and a program that has set one has it as set.
MOST_OF_THE_PROCESSOR = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
OLD_NAME = "DNNL_MAX_CPU_ISA"


class CannotStart(RuntimeError):
    """The simulated GPU cannot be started here; the message says why and what to do."""


# ---- what there is -------------------------------------------------------------------------------


def _torch_build() -> tuple[tuple[int, int], int]:
    """PyTorch's version and the major version of the CUDA it was built for, without importing
    it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CannotStart("PyTorch is not installed: there is nothing to simulate a GPU for")
    file = Path(spec.submodule_search_locations[0], "version.py")
    if not file.is_file():  # a folder of that name
        raise CannotStart("PyTorch is not installed: there is nothing to simulate a GPU for")
    version = file.read_text()
    found = re.search(r"^__version__ = '(\d+)\.(\d+)", version, re.M)
    cuda = re.search(r"^cuda: [^=]*= '(\d+)\.", version, re.M)
    if found is None or cuda is None:
        raise CannotStart(
            "this PyTorch was built without CUDA: install one that was (the one from PyPI is)"
        )
    return (int(found[1]), int(found[2])), int(cuda[1])


def _check_platform() -> None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise CannotStart("the simulated GPU runs on Linux, on x86-64 and aarch64")


def _faces(cuda: int) -> list[Path]:
    folder = library_path().with_name("faces")
    faces = [
        folder / "driver" / "libcuda.so.1",
        folder / "driver" / "libnvidia-ml.so.1",
        folder / str(cuda) / f"libcudart.so.{cuda}",
    ]
    for face in faces:
        if not face.exists():
            raise CannotStart(
                f"the simulated GPU has no {face.name}: this PyTorch is not supported"
            )
    return faces


# ---- PyTorch's import ----------------------------------------------------------------------------


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Registers the operators when PyTorch's import is done; steps aside for the search itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from ebbtide.sim.operators import install

            install()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def check() -> list[Path]:
    """The faces for the PyTorch that is installed, which is not imported; CannotStart if there is
    none, or none that a GPU can be simulated for."""
    _check_platform()
    version, cuda = _torch_build()
    if version < OLDEST_TORCH:
        raise CannotStart(
            f"PyTorch {version[0]}.{version[1]} is older than the simulated GPU supports: "
            f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer"
        )
    return _faces(cuda)


def _prepare() -> None:
    """Load the faces and wait for PyTorch's import."""
    for face in check():
        ctypes.CDLL(str(face), mode=ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, _AfterTorch())


# ---- the run -------------------------------------------------------------------------------------


def _remove_stale(folder: Path) -> None:
    """Files of runs whose process was killed before it could remove them."""
    for file in folder.glob("ebbtide-run-*"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(file.name.split("-")[2])
            if not Path("/proc", str(pid)).exists():
                file.unlink()


def _new_run() -> str:
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    _remove_stale(folder)
    handle, name = tempfile.mkstemp(prefix=f"ebbtide-run-{os.getpid()}-", dir=folder)
    os.close(handle)
    return name


def _own(name: str) -> None:
    def remove() -> None:
        if os.environ.get(OWNER) == str(os.getpid()):
            Path(name).unlink(missing_ok=True)

    atexit.register(remove)


def _figures(memory: int | str | None, card: str | None) -> Figures:
    size = None if memory is None else sizes.parse(memory)
    if size is not None:
        if size < LEAST:
            if str(memory).isdigit() and size < 1024:  # a unit was forgotten
                raise ValueError(f"a card of {memory} bytes is too small: {memory}GiB?")
            raise ValueError(f"a card of {memory} is too small: 32MiB is the least")
        if size > MOST:
            raise ValueError(f"a card of {memory} is too large: 64TiB is the most")
        size = size // GRANULARITY * GRANULARITY
    if card is not None:
        return card_of(card, size)
    return Figures.default(8 << 30 if size is None else size)


def environment(name: str) -> dict[str, str]:
    """What a process of the run has in its environment, beside what it has anyway."""
    site = str(Path(__file__).with_name("site"))
    package = str(Path(__file__).parents[2])
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    paths = [site, *[p for p in paths if p != site]]
    # A package that is not installed is found by its children all the same.
    if importlib.util.find_spec("ebbtide") and package not in paths and package in sys.path:
        paths.append(package)
    most = {} if OLD_NAME in os.environ else {**MOST_OF_THE_PROCESSOR}
    most = {key: os.environ.get(key, value) for key, value in most.items()}
    return {RUN: name, "PYTHONPATH": os.pathsep.join(paths), **most}


def prepare_run(
    memory: int | str | None,
    devices: int,
    card: str | None,
    clock: Literal["real", "virtual"],
) -> str:
    """Make a run with its cards; the file's name. ValueError for what makes no sense."""
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= 16:
        raise ValueError(f"there can be 1 to 16 devices, not {devices!r}")
    _check_platform()
    name = _new_run()
    os.environ[RUN] = name  # before the library is loaded: it opens the run at its first call
    try:
        figures = _figures(memory, card)
        set_clock(clock)
        for _ in range(devices):
            register(figures)
    except Exception:
        del os.environ[RUN]
        Path(name).unlink()
        raise
    return name


def start(
    memory: int | str | None = None,
    devices: int = 1,
    card: str | None = None,
    clock: Literal["real", "virtual"] = "real",
) -> None:
    """Give this process, and its children, simulated GPUs: torch.cuda.is_available() is then True.

    memory   of each card, "8GiB" or bytes; without it the card's own, or 8 GiB
    devices  how many cards
    card     a real card's figures, by a name of `ebbtide.sim.cards.CARDS`; else an H200's
    clock    "virtual": time is modelled alone, and timings are the same in every run

    To be called once, before torch is imported. CannotStart or ValueError say what is wrong.
    """
    if "torch" in sys.modules:
        raise CannotStart(
            "torch has been imported already: call ebbtide.sim.start() before `import torch`, or "
            "run the program with `ebbtide run --sim`"
        )
    if os.environ.get(RUN):
        return  # a process of a run that has its cards already
    check()
    name = prepare_run(memory, devices, card, clock)
    os.environ.update(environment(name))
    os.environ[OWNER] = str(os.getpid())
    _own(name)
    _prepare()


def join() -> None:
    """In a process that was started by one of a run (site/sitecustomize.py calls this)."""
    if os.environ.get(OWNER) == str(os.getpid()):
        _own(os.environ[RUN])
    _prepare()
