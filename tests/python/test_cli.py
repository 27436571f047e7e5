"""python -m ebbtide"""

import pytest

import ebbtide


def test_info_describes_the_driver_and_the_simulated_gpu(python, fake):
    done = python("-m", "ebbtide", "info", EBBTIDE_DRIVER=str(fake("good")), COLUMNS="120")
    assert done.returncode == 0, done.stderr
    assert "A fake GPU" in done.stdout
    assert "the simulated GPU" in done.stdout
    assert done.stdout.count("2 MiB") == 2


def test_info_says_why_a_driver_cannot_be_used(python, fake):
    done = python("-m", "ebbtide", "info", EBBTIDE_DRIVER=str(fake("old")), COLUMNS="120")
    assert done.returncode == 0, done.stderr
    assert "CUDA 11.8" in done.stdout


def test_version(python):
    done = python("-m", "ebbtide", "--version")
    assert (done.returncode, done.stdout) == (0, f"ebbtide {ebbtide.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["info", "too", "much"], ["--no"]])
def test_wrong_arguments_fail(python, arguments):
    done = python("-m", "ebbtide", *arguments)
    assert done.returncode == 2
    assert "usage: ebbtide" in done.stderr
    assert done.stdout == ""


def test_help_is_about_the_command(python):
    done = python("-m", "ebbtide", "--help")
    assert done.returncode == 0
    assert "ebbtide run --sim 8GiB train.py" in " ".join(done.stdout.split())
    assert "import" not in done.stdout
