"""Writes unicomm/_core.pyi, the types of the native core, from the built core: `make stubs`.

With --check it writes nothing, and exits with 1 if the file is not current.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

from nanobind.stubgen import StubGen, load_pattern_file

from unicomm import _core

PATTERNS = Path(__file__).parent / "stubs.patterns"
STUB = Path(__file__).parents[2] / "unicomm" / "_core.pyi"


def generated() -> str:
    """Returns the stub, formatted like the rest of the package."""
    stub = StubGen(_core, patterns=load_pattern_file(str(PATTERNS)), quiet=True)
    stub.put(_core)
    text = stub.get()
    for command in (["check", "--fix-only", "-q", "--unfixable", "F401"], ["format", "-q"]):
        ruff = Path(sysconfig.get_path("scripts")) / "ruff"
        done = subprocess.run(
            [ruff, *command, "--stdin-filename", STUB, "-"],
            input=text, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        text = done.stdout
    return text


def main() -> int:
    text = generated()
    if "--check" not in sys.argv[1:]:
        STUB.write_text(text)
    elif STUB.read_text() != text:
        print(f"{STUB} is not what the native core says: run `make stubs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
