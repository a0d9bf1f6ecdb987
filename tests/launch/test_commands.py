"""The command `unicomm`: versions, help, and packages that are not installed."""

import subprocess
import sys

import pytest
from typer.main import get_command

import unicomm
from tests.commands import clean_environment, run
from unicomm.flight_recorder import extras
from unicomm.launch.cli import app
from unicomm.launch.run.launcher import parser

# `unicomm`, in a process where a package cannot be imported.
WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None
from unicomm.launch.cli import main
main()
"""


def command(*words):
    return run([sys.executable, "-m", "unicomm", *words], env=clean_environment() | {"COLUMNS": "200"})


def test_version():
    done = command("--version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"unicomm {unicomm.__version__}, torch 2.")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [[], ["run"], ["doctor"], ["trace"], ["trace", "show"], ["profile", "merge"]]
)
def test_short_help(words):
    short, long = command(*words, "-h"), command(*words, "--help")
    assert short.returncode == 0
    assert short.stdout == long.stdout
    assert "usage" in short.stdout.lower()


@pytest.mark.parametrize(
    ("package", "module", "extra", "words"),
    [
        ("msgspec", "msgspec", "profile", ["profile", "merge", "a.json", "-o", "b.json"]),
        ("msgspec", "msgspec", "profile", ["profile", "report", "a.json"]),
        ("msgspec", "msgspec", "profile", ["profile", "annotate", "a.json", "b.json", "-o", "c.json"]),
        ("msgspec", "msgspec", "hub", ["trace", "top", "--connect", "localhost"]),
        ("pyzmq", "zmq", "hub", ["trace", "top", "--connect", "localhost"]),
        ("zmq", "zmq", "hub", ["run", "--hub", "a.py"]),
        ("prometheus-client", "prometheus_client", "metrics", ["trace", "export", "a"]),
        ("opentelemetry-proto", "opentelemetry", "metrics", ["trace", "export", "a", "--otlp", "b.json"]),
        ("prometheus-client", "prometheus_client", "metrics", ["run", "--metrics-port=0", "a.py"]),
        ("perfetto", "perfetto", "trace", ["trace", "analyze", "--perfetto", "a.pftrace"]),
        ("perfetto", "perfetto", "trace", ["profile", "merge", "TRACE", "-o", "m.pftrace"]),
    ],
)
def test_a_missing_package_is_one_sentence_with_its_cure(package, module, extra, words, tmp_path):
    """The real command, in a process where the package cannot be imported."""
    from benchmarks import profile_merge

    (trace,) = profile_merge.generate(tmp_path, 1, 100, 0.2, late=0)
    words = [str(trace) if word == "TRACE" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, module, *words],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    (said,) = done.stderr.strip().splitlines()
    assert "Traceback" not in said
    assert package in said
    assert said.endswith(f"pip install 'unicomm[{extra}]'")


def test_the_library_says_it_too():
    code = "import sys; sys.modules['msgspec'] = None; import unicomm.profiler; unicomm.profiler.merge"
    done = run([sys.executable, "-c", code], env=clean_environment())
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert "unicomm.profiler.merge needs the package msgspec, which is not installed" in said
    assert said.endswith(": pip install 'unicomm[profile]'")


def test_other_import_errors_stay_as_they_are(tmp_path):
    """A package that is installed but damaged is no missing package."""
    (tmp_path / "msgspec.py").write_text("import no_such_module_of_msgspec\n")
    environment = clean_environment() | {"PYTHONPATH": str(tmp_path)}
    done = run([sys.executable, "-m", "unicomm", "profile", "report", "a.json"], env=environment)
    assert done.returncode == 1
    assert "no_such_module_of_msgspec" in done.stderr


def test_extras_are_those_of_the_installed_package():
    assert extras.packages("hub") == ["msgspec", "pyzmq"]
    assert extras.packages("no such extra") == []


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["--nproc-per-node", "2", "train.py", "--a", "1", "--", "--b"], ["--a", "1", "--", "--b"]),
        (["--no-python", "env", "A=1", "--", "prog"], ["A=1", "--", "prog"]),
        (["--standalone", "train.py", "--metrics", "--token", "x"], ["--metrics", "--token", "x"]),
        (
            ["train.py", "--trace=1", "--verdict", "--hub", "--hub-port"],
            ["--trace=1", "--verdict", "--hub", "--hub-port"],
        ),
        (["--trace-dir", "rings", "-m", "package.train", "-h"], ["-h"]),
    ],
)
def test_arguments_of_the_program_are_its_own(words, script):
    found = get_command(app).commands["run"].make_context("run", list(words)).args
    assert found == words
    assert parser().parse_args(found).training_script_args == script
