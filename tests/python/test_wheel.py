"""The wheel is one for all Pythons from 3.10, and works where only it and rich are installed."""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution

import pytest

WORDS = {"cwd": "/", "capture_output": True, "text": True}


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], **{**WORDS, **options})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, request):
    # Built from a copy: a build of its own must not touch what this clone has built.
    folder = tmp_path_factory.mktemp("wheel")
    repository = request.config.rootpath
    leave = shutil.ignore_patterns("build", ".git", "__pycache__", ".hypothesis")
    shutil.copytree(repository, folder / "source", ignore=leave)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder]
    run(*pip, "wheel", "--quiet", *options, folder / "source")
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, wheel):
    """The python of an environment that holds the wheel, rich, and what rich needs."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import site; print(site.getsitepackages()[0])").strip()
    for name in ("rich", "pygments", "markdown-it-py", "mdurl"):
        # By link, not by pip: nothing is fetched from anywhere.
        for top in {file.parts[0] for file in distribution(name).files if file.parts[0] != ".."}:
            (folder / site / top).symlink_to(distribution(name).locate_file(top))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel)
    return python


def test_the_wheel_is_for_every_python_from_3_10(wheel):
    assert "-cp310-abi3-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("_core.abi3.so", "libebbtide_sim.so", "_core.pyi", "py.typed", "__init__.py"):
        assert f"ebbtide/{name}" in names
    for face in ("12/libcudart.so.12", "13/libcudart.so.13", "driver/libcuda.so.1"):
        assert f"ebbtide/faces/{face}" in names
    assert "ebbtide/faces/driver/libnvidia-ml.so.1" in names
    assert not [name for name in names if name.endswith((".c", ".h"))]


def test_the_installed_wheel_works(fresh):
    environment = {"COLUMNS": "120", "EBBTIDE_DRIVER": "/no/such/driver.so"}
    shown = run(fresh, "-I", "-m", "ebbtide", "info", env=environment)
    assert "/no/such/driver.so" in shown
    assert "the simulated GPU" in shown
    assert "can be used" in shown


def test_the_installed_wheel_needs_no_torch(fresh):
    absent = "import importlib.util as u; assert u.find_spec('torch') is None"
    run(fresh, "-I", "-c", absent)
    run(fresh, "-I", "-c", "import ebbtide.sim; print(ebbtide.sim.library())")


def test_the_installed_wheel_shows_its_tour_without_torch(fresh):
    shown = run(fresh, "-I", "-m", "ebbtide", "tour", env={"PYTHONIOENCODING": "utf-8"})
    assert "skipped: PyTorch is not installed" in shown
    assert "all true, 1 act skipped" in shown


def test_the_wheel_names_its_pytest_plugin(wheel):
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith("entry_points.txt")]
        text = files.read(name).decode()
    assert "[pytest11]\nebbtide = ebbtide.sim.pytest_plugin" in text.replace(
        "ebbtide=", "ebbtide = "
    )
