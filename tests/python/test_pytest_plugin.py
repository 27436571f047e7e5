"""pytest --ebbtide-sim, on a small project of its own: as a project's CI would use it."""

from __future__ import annotations

import re
import textwrap

import pytest

PROJECT = """
    import pytest
    import torch

    def add_on_another_stream(wait):
        aside, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(aside):
            x.fill_(3)
        if wait:
            torch.cuda.current_stream().wait_stream(aside)
        return x + 1

    def test_right():
        assert torch.cuda.device_count() == 2
        assert torch.cuda.mem_get_info()[1] == 256 << 20
        assert add_on_another_stream(wait=True).sum().item() == 4000

    def test_wrong():
        add_on_another_stream(wait=False)

    def test_source():  # found only when the copy is over
        pinned = torch.ones(100_000).pin_memory()
        pinned.to("cuda", non_blocking=True)
        pinned.fill_(5)

    def test_fails_by_itself():
        add_on_another_stream(wait=False)
        assert False, "its own words"

    @pytest.fixture
    def rash():
        yield
        add_on_another_stream(wait=False)

    def test_teardown(rash):
        pass

    @pytest.mark.ebbtide_hazards
    def test_marked():
        from ebbtide import sim

        add_on_another_stream(wait=False)
        assert sim.hazard_count() == 1

    def test_after_all_that():
        assert add_on_another_stream(wait=True).sum().item() == 4000
"""


@pytest.fixture
def project(python, tmp_path):
    """project(text, *arguments) runs pytest on a project with one file of tests."""

    def run(text: str, *arguments: str):
        (tmp_path / "test_project.py").write_text(textwrap.dedent(text))
        words = ("-p", "ebbtide.sim.pytest_plugin", "-p", "no:cacheprovider", "-rA", *arguments)
        return python("-m", "pytest", "--rootdir", str(tmp_path), *words, str(tmp_path))

    return run


def failure(output: str, test: str) -> str:
    """A test's part of the report."""
    return re.search(rf"_ (?:ERROR at \w+ of )?{test} _+\n(.*?)\n[_=]{{9}}", output, re.DOTALL)[1]


def test_a_test_fails_by_its_hazards(project):
    done = project(PROJECT, "--ebbtide-sim", "256MiB", "--ebbtide-devices", "2", "--strict-markers")
    output = done.stdout
    assert done.returncode == 1, output + done.stderr
    assert "ebbtide: 2 simulated GPUs of 256MiB" in output
    verdicts = {test: kind for kind, test in re.findall(r"(?m)^([A-Z]+) \S+::(\w+)", output)}
    assert verdicts == {
        "test_right": "PASSED",
        "test_wrong": "FAILED",
        "test_source": "FAILED",
        "test_fails_by_itself": "FAILED",
        "test_teardown": "ERROR",
        "test_marked": "PASSED",
        "test_after_all_that": "PASSED",
    }
    report = failure(output, "test_wrong")
    assert report.startswith("a hazard was reported on the simulated GPU")
    assert re.search(r"race: aten::add.Tensor on .* is not ordered after what aten::fill_", report)
    assert "Traceback" not in report
    assert "source changed" in failure(output, "test_source")
    own = failure(output, "test_fails_by_itself")
    assert "its own words" in own and "race: aten::add.Tensor" in own
    assert "race: aten::add.Tensor" in failure(output, "test_teardown")
    assert "hazards outside of tests" not in output


def test_hazards_of_a_whole_module_are_not_lost(project):
    done = project(
        """
        import torch

        aside, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(aside):
            x.fill_(3)
        x + 1

        def test_nothing():
            pass
        """,
        "--ebbtide-sim",
        "64MiB",
    )
    assert done.returncode == 1
    assert "1 passed" in done.stdout
    assert "race: aten::add.Tensor" in done.stdout.partition("hazards outside of tests")[2]


def test_without_the_option_it_does_nothing(project):
    done = project(
        """
        import os, sys
        import pytest

        @pytest.mark.ebbtide_hazards
        def test_nothing():
            assert "EBBTIDE_SIM_RUN" not in os.environ and "torch" not in sys.modules
        """,
        "--strict-markers",
    )
    assert done.returncode == 0, done.stdout
    assert "ebbtide:" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ebbtide-sim", "eight"], "--ebbtide-sim: 'eight' is not a size"),
        (["--ebbtide-sim", "1GiB", "--ebbtide-devices", "0"], "1 to 16 devices"),
        (["--ebbtide-devices", "2"], "--ebbtide-devices needs --ebbtide-sim"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_make_no_sense_are_usage_errors(project, arguments, complaint):
    done = project("", *arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_torch_imported_first_is_a_usage_error(python, tmp_path):
    program = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
import pytest
sys.exit(pytest.main(["-p", "ebbtide.sim.pytest_plugin", "--ebbtide-sim", "1GiB", sys.argv[1]]))
"""
    done = python("-c", program, str(tmp_path))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "torch has been imported already" in done.stderr


def test_in_a_run_torch_may_have_been_imported(python, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, pytest\n"
        "sys.exit(pytest.main(['-p', 'ebbtide.sim.pytest_plugin', '--ebbtide-sim', '1GiB', "
        "'-p', 'no:cacheprovider', sys.argv[1]]))\n"
    )
    test = tmp_path / "test_project.py"
    test.write_text(
        textwrap.dedent("""
            import torch

            def test_wrong():
                aside, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
                torch.cuda.synchronize()
                with torch.cuda.stream(aside):
                    x.fill_(3)
                x + 1
        """)
    )
    done = python("-m", "ebbtide", "run", "--sim", "64MiB", str(program), str(test))
    assert done.returncode == 1
    assert "ebbtide: the simulated GPUs of the run it was started in" in done.stdout
    assert "race: aten::add.Tensor" in done.stdout
