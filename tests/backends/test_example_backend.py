"""The example of a backend, built as a package: its own tests pass, also after it is copied and renamed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from tests import ROOT
from tests.commands import clean_environment, run
from unicomm.testing import conformance

EXAMPLE = ROOT / "examples" / "unicomm-sockets"
pytestmark = pytest.mark.processes


def installed(source, folder):
    """Builds the package and installs it into a folder; returns an environment that finds it there."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    quiet = ["--no-deps", "--no-build-isolation", "--no-index"]
    env = clean_environment()
    run([*pip, "wheel", *quiet, "-w", folder / "dist", source], env=env, check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    run([*pip, "install", *quiet, "--target", folder / "site", wheel], env=env, check=True)
    return env | {"PYTHONPATH": str(folder / "site")}


def own_tests(folder, env, *options):
    """Runs the package's own tests, away from the source, and returns what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, *options]
    ran = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=env,
        timeout=280,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    return ran.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    source = shutil.copytree(EXAMPLE, folder / "source")
    return source / "tests", installed(source, folder)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_package_conforms(package, ranks):
    said = own_tests(*package, "-k", f"conformance and -{ranks}]")
    assert re.search(r"(\d+) passed", said)[1] == str(len(conformance.OPERATIONS))
    assert "skipped" not in said


def test_the_package_passes_its_other_tests(package):
    said = own_tests(*package, "-k", "not conformance")
    assert int(re.search(r"(\d+) passed", said)[1]) > 10
    assert "skipped" not in said


def test_a_renamed_copy_is_a_backend_of_its_own(tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "unicomm-sockets")
    (steps,) = re.findall(r"\n((?:    .*\n)+)\nThe tests pass as before", (EXAMPLE / "README.md").read_text())
    subprocess.run(["bash", "-ec", steps], cwd=tmp_path, check=True, timeout=200)
    source = tmp_path / "unicomm-acme"
    left = subprocess.run(
        ["grep", "-rlE", "unicomm.sockets|SocketsBackend", "."],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert left.stdout == "", left.stdout
    env = installed(source, tmp_path)
    own_tests(source / "tests", env, "-k", "name or broadcast or abort")
    program = "import unicomm; print(unicomm.new_comm('acme', 'cpu').get_backend())"
    assert run([sys.executable, "-c", program], env=env, check=True).stdout == "acme\n"
    assert (source / "src" / "unicomm_acme" / "backend.py").exists()
