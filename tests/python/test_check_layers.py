"""tools/check-layers passes this repository, and fails a tree that breaks a rule."""

import subprocess
import sys

import pytest


@pytest.fixture
def check(repository):
    def run(*arguments) -> subprocess.CompletedProcess:
        command = [sys.executable, repository / "tools" / "check-layers", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    return run


@pytest.fixture
def tree(tmp_path):
    """A small tree that keeps every rule; tree(path=text) writes files into it."""

    def write(files: dict[str, str]) -> str:
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return str(tmp_path)

    write(
        {
            "include/ebbtide.h": "#if defined(_WIN32)\n#endif\n",
            "include/ebbtide_sim.h": "",
            "src/core/cuda_abi.h": "",
            "src/core/driver.h": '#include "cuda_abi.h"\n#include "ebbtide.h"\ncuCtxSynchronize\n',
            "src/core/os_win32.c": "#ifdef _WIN32\n#endif\n",
            "src/core/driver.c": '#include "driver.h"\n/* never cuCtxSynchronize */\n',
            "src/doors/blocks.h": '#include "driver.h"\n',
            "src/doors/segment.h": "",
            "src/lms/swap.c": '#include "../doors/blocks.h"\n',
            "src/ipc/share.c": '#include "blocks.h"\n#include "driver.h"\n',
            "sim/sim.h": "",
            "sim/face.c": '#include "sim.h"\n#include "cuda_abi.h"\n#include "ebbtide_sim.h"\n',
            "python/ebbtide/_core.c": '#include <Python.h>\n#include "ebbtide.h"\n',
            "python/ebbtide/__init__.py": "from ebbtide import sim\n",
            "python/ebbtide/sim/__init__.py": "def a():\n    from ebbtide.sim import operators\n",
            "python/ebbtide/sim/operators/__init__.py": "import torch\n",
            "python/ebbtide/_attach.py": "import torch\n",
        }
    )
    return write


def test_this_repository_keeps_the_rules(check):
    done = check()
    assert (done.returncode, done.stdout) == (0, "")


def test_a_good_tree_passes(check, tree):
    done = check(tree({}))
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("src/core/room.c", '#include "blocks.h"', "src/core must not include src/doors/blocks.h"),
        ("src/core/room.c", '#include "ebbtide_sim.h"', "must not include include/ebbtide_sim.h"),
        ("src/core/room.c", "#include <cuda.h>", "must not include <cuda.h>"),
        ("src/core/room.c", "#include <Python.h>", "must not include <Python.h>"),
        ("src/doors/oom.c", "#include <c10/util/Exception.h>", "must not include <c10/"),
        ("src/move/host.c", '#include "../doors/blocks.h"', "must not include src/doors/blocks.h"),
        ("src/lms/plan.c", '#include "segment.h"', "src/lms must not include src/doors/segment.h"),
        ("sim/memory.c", '#include "driver.h"', "sim must not include src/core/driver.h"),
        ("sim/memory.c", '#include "ebbtide.h"', "sim must not include include/ebbtide.h"),
        ("examples/tour.c", '#include "driver.h"', "examples must not include src/core/driver.h"),
        ("src/core/room.c", '#include "nowhere.h"', "nowhere in this repository"),
        ("src/else/room.c", '#include "driver.h"', "belongs to no layer"),
        ("src/core/room.c", "#ifdef _WIN32\n#endif", "the platform is the business of"),
        ("src/core/room.c", "d->cuCtxSynchronize();", "a context is never synchronised"),
        ("python/ebbtide/stats.py", "import torch", "is not a file that may use torch"),
        ("python/ebbtide/stats.py", "def f():\n    import torch.cuda", "may use torch"),
        ("python/ebbtide/__init__.py", "from ._attach import a", "thus torch"),
        ("python/ebbtide/__init__.py", "from ebbtide import _attach", "thus torch"),
        ("python/ebbtide/sim/__init__.py", "from ebbtide.sim import operators", "thus torch"),
    ],
)
def test_a_broken_rule_is_named(check, tree, path, text, complaint):
    done = check(tree({path: text + "\n"}))
    assert done.returncode == 1
    assert done.stdout.startswith(path + ":")
    assert complaint in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_a_folder_that_is_not_there(check, tmp_path):
    assert check(tmp_path / "nowhere").returncode == 2
