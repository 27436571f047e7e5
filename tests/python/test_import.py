"""What `import ebbtide` brings, and what it does not."""

import ast
import re
from pathlib import Path

import ebbtide
from ebbtide import _core

TORCH_FREE = [
    "ebbtide",
    "ebbtide.sim",
    "ebbtide.cli",
    "ebbtide.cli.info",
    "ebbtide.cli.demo",
    "ebbtide.cli.tour",
]


def test_importing_the_package_does_not_import_torch(python):
    for module in TORCH_FREE:
        code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
        done = python("-c", code)
        assert done.returncode == 0, f"{module}: {done.stderr}"


def test_the_version_is_the_headers(repository):
    header = (repository / "include/ebbtide.h").read_text()
    parts = [re.search(rf"EBB_VERSION_{p} (\d+)", header)[1] for p in ("MAJOR", "MINOR", "PATCH")]
    assert ebbtide.__version__ == ".".join(parts)


def test_every_status_has_its_exception(repository):
    header = (repository / "include/ebbtide.h").read_text()
    statuses = {name: int(value) for name, value in re.findall(r"X\((EBB_\w+), (-?\d+),", header)}
    # Success is none, and the host's memory is Python's own MemoryError.
    del statuses["EBB_OK"], statuses["EBB_NO_HOST_MEMORY"]
    kinds = {kind.status for kind in ebbtide.Error.__subclasses__()}
    assert kinds == set(statuses.values())


def test_the_stub_names_what_the_extension_has():
    tree = ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text())
    stub = {
        node.target.id if isinstance(node, ast.AnnAssign) else node.name
        for node in tree.body
        if isinstance(node, (ast.AnnAssign, ast.ClassDef, ast.FunctionDef))
    }
    assert stub == {name for name in vars(_core) if not name.startswith("__")}


def test_everything_exported_is_there():
    for name in ebbtide.__all__:
        assert hasattr(ebbtide, name)
