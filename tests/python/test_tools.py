"""tools/env and tools/setup: what stands between a bare machine and `make test`."""

import os
import shutil
import subprocess

import pytest


@pytest.fixture
def clone(repository, tmp_path):
    """clone("a") is a small clone whose environment holds nothing, so that making it is quick."""

    def make(name: str):
        folder = tmp_path / name
        (folder / "requirements").mkdir(parents=True)
        (folder / "tools").mkdir()
        shutil.copy(repository / "tools" / "env", folder / "tools")
        (folder / "requirements" / "dev.txt").write_text("# nothing\n")
        return folder

    return make


def call(folder, cache, *arguments):
    environment = {**os.environ, "EBBTIDE_CACHE": str(cache)}
    command = [folder / "tools/env", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def prepare(folder, cache, *arguments) -> str:
    done = call(folder, cache, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


def test_an_environment_is_made_once_and_found_by_a_second_clone(clone, tmp_path):
    cache = tmp_path / "cache"
    python = prepare(clone("a"), cache)
    assert "\n" not in python
    assert subprocess.run([python, "-c", "pass"]).returncode == 0
    made = os.stat(python, follow_symlinks=False).st_mtime_ns
    assert prepare(clone("b"), cache) == python
    assert os.stat(python, follow_symlinks=False).st_mtime_ns == made

    # What was broken off half-way has no stamp, and is made again.
    stamp = cache / python.split("/bin/")[0] / ".complete"
    stamp.unlink()
    leftover = stamp.with_name("leftover")
    leftover.touch()
    assert prepare(clone("c"), cache) == python
    assert stamp.exists()
    assert not leftover.exists()

    # Other requirements are another environment, beside the first.
    other = clone("d")
    (other / "requirements" / "dev.txt").write_text("# nothing, in other words\n")
    assert prepare(other, cache) != python
    assert stamp.exists()


def test_an_environment_can_be_made_of_other_requirements(clone, tmp_path):
    folder, cache = clone("a"), tmp_path / "cache"
    (folder / "requirements" / "oldest.txt").write_text("# nothing, of old\n")
    oldest = prepare(folder, cache, "requirements/oldest.txt")
    assert oldest != prepare(folder, cache)
    assert oldest == prepare(folder, cache, "requirements/oldest.txt")
    done = call(folder, cache, "requirements/none.txt")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "env: there is no requirements/none.txt\n"


@pytest.fixture
def bare(tmp_path):
    """A PATH with a shell's usual commands, without build tools; apt-get only writes down."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "sh", "env", "sed", "sort", "head", "uname", "python3"):
        (folder / name).symlink_to(shutil.which(name))
    apt = folder / "apt-get"
    apt.write_text('#!/bin/sh\necho "$@" >> "$APT_LOG"\n')
    apt.chmod(0o755)
    return {"PATH": str(folder), "APT_LOG": str(tmp_path / "apt.log")}


def test_missing_build_tools_are_installed_or_named(repository, bare):
    done = subprocess.run([repository / "tools/setup"], env=bare, capture_output=True, text=True)
    assert done.stdout == ""
    if os.geteuid() == 0:
        assert done.returncode == 0, done.stderr
        with open(bare["APT_LOG"]) as log:
            update, install = log.read().splitlines()
        assert update.startswith("update")
    else:
        assert done.returncode == 1
        (install,) = [line for line in done.stderr.splitlines() if "apt-get" in line]
    for package in ("gcc", "clang", "cmake", "ninja-build", "clang-format", "clang-tidy"):
        assert f" {package} " in install.replace("'", " ") + " "


def test_nothing_is_installed_where_nothing_is_missing(repository, bare):
    environment = {**os.environ, "APT_LOG": bare["APT_LOG"]}
    environment["PATH"] += os.pathsep + bare["PATH"]
    done = subprocess.run([repository / "tools/setup"], env=environment, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not os.path.exists(bare["APT_LOG"])
