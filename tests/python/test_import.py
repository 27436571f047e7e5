"""What `import ebbtide` brings, and what it does not."""

import ast
import re
from pathlib import Path

import pytest

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
    # Success is none, offloaded is None, and the host's memory is Python's own MemoryError.
    del statuses["EBB_OK"], statuses["EBB_OFFLOADED"], statuses["EBB_NO_HOST_MEMORY"]
    kinds = {kind.status for kind in ebbtide.Error.__subclasses__()}
    assert kinds == set(statuses.values())


def stub():
    """The stub's definitions that are there when the program runs, by name."""
    tree = ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text())
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign):
            found[node.target.id] = node
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not any(
            getattr(word, "id", "") == "type_check_only" for word in node.decorator_list
        ):
            found[node.name] = node
    return found


def test_the_stub_names_what_the_extension_has():
    assert set(stub()) == {name for name in vars(_core) if not name.startswith("__")}


KINDS = [
    _core.Device,
    _core.VBAR,
    _core.Weight,
    _core.Ahead,
    _core.Unit,
    _core.Mover,
    _core.Load,
    _core.Pass,
    _core.Gate,
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_stub_has_their_members(kind):
    body = stub()[kind.__name__].body
    methods = {
        n.name: n
        for n in body
        if isinstance(n, ast.FunctionDef) and not n.decorator_list and not n.name.startswith("__")
    }
    attributes = {n.target.id for n in body if isinstance(n, ast.AnnAssign)}
    attributes |= {n.name for n in body if isinstance(n, ast.FunctionDef) and n.decorator_list}
    there = {name for name in vars(kind) if not name.startswith("__")}
    assert set(methods) | attributes == there
    assert {name for name in there if callable(vars(kind)[name])} == set(methods)
    for name, node in methods.items():
        words = getattr(kind, name).__text_signature__
        if words is None:  # those that take nothing, or one, say nothing
            continue
        arguments = node.args
        positional = ["$self", *(a.arg for a in arguments.posonlyargs[1:])]
        if not arguments.posonlyargs:
            assert [a.arg for a in arguments.args[:1]] == ["self"]
        others = [a.arg for a in arguments.args if a.arg != "self"]
        named = [f"{a}={ast.unparse(d)}" for a, d in zip(others, arguments.defaults, strict=True)]
        assert words == f"({', '.join([*positional, '/', *named])})", name


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_set_is_a_property_in_the_stub(kind):
    settable = {
        _core.Device: {"limit", "headroom", "_stream_at", "_stream_of"},
        _core.Unit: {"stale", "closes", "settled", "small", "base", "version"}
        | {"load", "views", "tensors"},
        _core.Pass: {"run", "watched", "course"},
        _core.Gate: {"name", "unit", "slow", "root", "run", "enters", "leaves", "compiled"},
    }
    found = {
        node.target.id for node in stub()[kind.__name__].body if isinstance(node, ast.AnnAssign)
    }
    assert found == settable.get(kind, set())


def test_everything_exported_is_there():
    for name in ebbtide.__all__:
        assert hasattr(ebbtide, name)
