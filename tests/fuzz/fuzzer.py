"""The process that fuzzes one target with atheris.

    python -m tests.fuzz.fuzzer TARGET SEEDS GROWN FOUND [option of libFuzzer ...]

GROWN receives the inputs that reached new code; a later run begins with them, too.

An input that breaks a promise is written to FOUND, with its traceback beside it, one input for each kind of
break. Then fuzzing goes on. libFuzzer itself writes inputs there that end the process: crashes of native
code, endless loops, and memory that is never given back.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import atheris

from .limits import limited

if TYPE_CHECKING:
    from .targets import Target

_ADDRESSES = 3 << 30  # bytes of addresses beyond those at the start: what asks for more gets a MemoryError
_BYTES_ALONE = 0.15  # the share of inputs that are changed without regard to their format


def _instrumented(name: str) -> Target:
    """Returns a target, after importing what reads its inputs, so that atheris sees the branches in it."""
    # atheris instruments modules that Python's own loader of files loads. That of an editable installation
    # remains for the native core, which lies elsewhere.
    sys.meta_path.sort(key=lambda finder: type(finder).__name__ == "ScikitBuildRedirectingFinder")
    with atheris.instrument_imports(include=["unicomm"]):
        from .targets import TARGETS

        for module in TARGETS[name].modules:
            import_module(module)
    return TARGETS[name]


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + _ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _mutator(target: Target) -> Callable[[bytes, int, int], bytes]:
    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() >= _BYTES_ALONE:
            made = target.mutate(bytes(data), rng)
            if 0 < len(made) <= most and made != data:
                return made
        return bytes(atheris.Mutate(data, most))

    return mutate


def main() -> None:
    name, seeds, grown, found, *options = sys.argv[1:]
    target, places = _instrumented(name), set[str]()
    from .targets import Room, signature

    room = Room(Path(seeds)).__enter__()  # in TMPDIR, which the caller removes: libFuzzer ends this process

    def one_input(data: bytes) -> None:
        try:
            with limited():
                target(room, data)
        except Exception as error:
            if (what := signature(error)) in places:
                return
            places.add(what)
            digest = hashlib.sha256(data).hexdigest()[:12]
            path = Path(found, f"{name}-{digest}")
            path.write_bytes(data)
            path.with_suffix(".txt").write_text(
                what + "\n" + "".join(traceback.format_exception(error)), errors="backslashreplace"
            )
            print(f"BROKEN {path}: {what}", file=sys.stderr, flush=True)

    _bound_memory()
    command = [sys.argv[0], grown, str(Path(seeds, name)), f"-artifact_prefix={found}/{name}-", *options]
    atheris.Setup(command, one_input, custom_mutator=_mutator(target))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
