"""ebbtide run and ebbtide.sim.start(): what a program sees of them, and bad input."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CARD = "import torch; print(torch.cuda.device_count(), torch.cuda.mem_get_info()[1] >> 20)"


@pytest.fixture
def script(tmp_path):
    def write(text):
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(text))
        return str(file)

    return write


@pytest.fixture
def run(python):
    return lambda *words, **names: python("-m", "ebbtide", "run", *words, **names)


def test_a_program_finds_its_cards(run, script):
    done = run("--sim", "256MiB", "--devices", "2", script(CARD))
    assert (done.stdout, done.returncode) == ("2 256\n", 0), done.stderr


def test_a_cards_figures(run, script):
    program = script("import torch; print(torch.cuda.get_device_properties(0))")
    done = run("--card", "rtx4090", program)
    assert "RTX 4090" in done.stdout and "major=8, minor=9" in done.stdout, done.stderr


def test_the_program_is_itself(run, script):
    program = script("""
        import sys
        print(__name__, sys.argv[1:])
        sys.exit(7)
    """)
    done = run("--sim", "64MiB", program, "--its", "-m", "own", "--sim")
    assert (done.stdout, done.returncode) == ("__main__ ['--its', '-m', 'own', '--sim']\n", 7)


def test_products_do_without_amx_where_nobody_asks_for_it(run, script):
    """A virtual machine may name it among what it can, and stop whoever uses it."""
    program = script("""
        import os, torch
        for dtype in torch.bfloat16, torch.float16:
            x = torch.ones(16, 64, dtype=dtype, device="cuda")
            print((x @ x.T).sum().item())
        print(os.environ.get("ONEDNN_MAX_CPU_ISA"))
    """)
    for names, most in (
        ({}, "AVX512_CORE_FP16"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2"),
        ({"DNNL_MAX_CPU_ISA": "AVX2"}, "None"),
    ):
        done = run("--sim", "64MiB", program, **names)
        assert (done.stdout, done.returncode) == (f"16384.0\n16384.0\n{most}\n", 0), done.stderr


def test_tracebacks_are_those_of_the_program(run, python, script):
    program = script("def f():\n    raise KeyError('lost')\nf()\n")
    assert run("--sim", "64MiB", program).stderr == python(program).stderr


def test_signals_reach_the_program(run, script):
    program = script("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert run("--sim", "64MiB", program).returncode == -signal.SIGTERM


def test_a_module_is_run(run):
    done = run("--sim", "64MiB", "-m", "platform", "--terse")
    assert done.returncode == 0 and "Linux" in done.stdout


def test_child_processes_share_the_card(run, script):
    program = script("""
        import multiprocessing, subprocess, sys
        import torch

        def child(queue):
            x = torch.ones(32 << 20, dtype=torch.uint8, device="cuda")
            queue.put(torch.cuda.mem_get_info()[0] >> 20)
            queue.get()

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            before = torch.cuda.mem_get_info()[0] >> 20
            process = context.Process(target=child, args=(queue,))
            process.start()
            there = queue.get()
            assert there == torch.cuda.mem_get_info()[0] >> 20 < before - 32, (there, before)
            queue.put(None)
            process.join()
            assert torch.cuda.mem_get_info()[0] >> 20 == before
            print(subprocess.check_output([sys.executable, "-c", "import torch; "
                "print(torch.ones(3, device='cuda').sum().item())"], text=True), end="")
    """)
    done = run("--sim", "512MiB", program)
    assert (done.stdout, done.returncode) == ("3.0\n", 0), done.stderr


def test_start_in_the_program(python, script):
    program = script("""
        import ebbtide.sim
        ebbtide.sim.start(memory="128MiB", devices=3)
        import torch
        print(torch.cuda.device_count(), torch.ones(5, device="cuda:2").sum().item())
    """)
    done = python(program)
    assert (done.stdout, done.returncode) == ("3 5.0\n", 0), done.stderr


def test_start_after_torch_says_so(python, script):
    program = script("""
        import sys, types
        sys.modules["torch"] = types.ModuleType("torch")
        import ebbtide.sim
        ebbtide.sim.start()
    """)
    done = python(program)
    assert done.returncode == 1
    assert "before `import torch`" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--sim", "8GiB", "no-such-file.py"], "there is no file no-such-file.py"),
        (["--sim", "8GiB"], "which program?"),
        (["program.py"], "say which GPU"),
        (["--sim", "eight", __file__], "'eight' is not a size"),
        (["--sim", "-1", __file__], "'-1' is not a size"),
        (["--sim", "1MiB", __file__], "too small"),
        (["--sim", "8GiB", "--devices", "0", __file__], "1 to 16 devices"),
        (["--sim", "8GiB", "--devices", "17", __file__], "1 to 16 devices"),
        (["--card", "rtx9999", __file__], "there is no card 'rtx9999'"),
        (["--sim", "x.py"], "--sim needs a size: --sim 8GiB x.py"),
        (["--sim"], "--sim needs a size: --sim 8GiB"),
        (
            ["--sim", "--card", "rtx4060", "x.py"],
            "--sim needs a size: --sim 8GiB --card rtx4060 x.py",
        ),
        (["--card", "x.py"], "--card needs a card's name: --card rtx4090 x.py"),
        (["--sim", "8GiB", "-m"], "-m needs a module"),
        (
            ["x.py", "--sim", "8GiB", "--steps", "5"],
            "options go before the program: ebbtide run --sim 8GiB x.py --steps 5",
        ),
        (["x.py", "--card=t4"], "options go before the program: ebbtide run --card=t4 x.py"),
        (
            ["--sim", "8GiB", "python", "x.py"],
            "give the script itself, without python: ebbtide run --sim 8GiB x.py",
        ),
        (["--sim", "8GiB", sys.executable, "x.py"], "give the script itself"),
        (["--sim", "9999TiB", __file__], "a card of 9999TiB is too large: 64TiB is the most"),
        (["--sim", "8", __file__], "a card of 8 bytes is too small: 8GiB?"),
        (["--sim", "4096", __file__], "a card of 4096 is too small: 32MiB is the least"),
        (["--sim", "8GiB", "/tmp"], "/tmp is a folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_input_gets_one_line_and_a_status(run, words, complaint):
    done = run(*words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("ebbtide run: ") and complaint in line


def test_an_option_that_is_not_ours_is_refused(run):
    done = run("--sim", "8GiB", "--no-such-option", __file__)
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr.splitlines()[-1]


def test_the_largest_card(run, script):
    done = run("--sim", "64TiB", script(CARD))
    assert (done.stdout, done.returncode) == (f"1 {64 << 20}\n", 0), done.stderr


def test_two_dashes_may_stand_before_the_program(run, script):
    program = script("import sys; print(sys.argv[1:])")
    done = run("--sim", "64MiB", "--", program, "--", "--sim")
    assert (done.stdout, done.returncode) == ("['--', '--sim']\n", 0), done.stderr


def test_help_has_the_defaults(run):
    done = run("--help")
    assert done.returncode == 0
    assert " ".join(done.stdout.split()).count("(default: ") == 4


# As where another PyTorch is installed, in this folder; or none.
WITH_TORCH_OF = """
import importlib.machinery, importlib.util, sys
find, spec = importlib.util.find_spec, None
if sys.argv[1]:
    spec = importlib.machinery.ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [sys.argv[1]]
importlib.util.find_spec = lambda name, *rest: spec if name == "torch" else find(name, *rest)
from ebbtide.cli import main
sys.exit(main(["run", "--sim", "64MiB", sys.argv[2]]))
"""


@pytest.mark.parametrize(
    ("version", "complaint"),
    [
        (None, "PyTorch is not installed"),
        ("", "PyTorch is not installed"),
        ("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None", "built without CUDA"),
        ("__version__ = '2.5.1'\ncuda: Optional[str] = '12.4'", "PyTorch 2.5 is older"),
        ("__version__ = '2.99.0'\ncuda: Optional[str] = '99.0'", "no libcudart.so.99"),
    ],
    ids=["none", "a folder of that name", "for CPUs", "too old", "another CUDA"],
)
def test_a_pytorch_that_cannot_be_served_gets_one_line_and_a_status(
    python, script, tmp_path, version, complaint
):
    if version:
        (tmp_path / "version.py").write_text(version)
    folder = "" if version is None else str(tmp_path)
    done = python("-c", WITH_TORCH_OF, folder, script("print('it ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ebbtide run: ") and complaint in line


def test_a_run_leaves_no_file_behind(script):
    process = subprocess.Popen(
        [sys.executable, "-m", "ebbtide", "run", "--sim", "64MiB", script("import torch")]
    )
    assert process.wait() == 0
    assert list(Path("/dev/shm").glob(f"ebbtide-run-{process.pid}-*")) == []


def test_the_example(python, repository):
    done = python(str(repository / "examples" / "train_sim.py"))
    assert done.returncode == 0, done.stderr
    assert "RTX 4090 (simulated)" in done.stdout
    assert "Tried to allocate 1024.00 MiB" in done.stdout
    assert done.stdout.endswith("\n0 hazards\n")
