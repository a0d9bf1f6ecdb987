"""Builds the mock of NCCL and RCCL once for all test processes, with the C++ compiler at hand.

`library()` is its path; `library(22105)` plays an older NCCL, whose newer symbols are really absent, and
`library(22105, rccl=True)` an RCCL. All are linked from the same objects.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ["-std=c++17", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
LATEST = 23203

# The version that brought a function; all others are as old as the oldest that is played.
SINCE = {
    **dict.fromkeys(("ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister"), 21900),
    "ncclGroupSimulateEnd": 22200,
    "ncclCommInitRankScalable": 22300,
    **dict.fromkeys(("ncclCommWindowRegister", "ncclCommWindowDeregister", "ncclCommShrink"), 22700),
    **dict.fromkeys(("ncclAlltoAll", "ncclGather", "ncclScatter"), 22800),
    "ncclCommRevoke": 22807,
    **dict.fromkeys(("ncclCommGetUniqueId", "ncclCommGrow", "ncclWinGetUserPtr"), 22902),
    "ncclGetPeerDevicePointer": 22902,
    **dict.fromkeys(("ncclPutSignal", "ncclSignal", "ncclWaitSignal"), 22902),
    **dict.fromkeys(("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats"), 22907),
    **dict.fromkeys(("ncclAllReduceConfig", "ncclReduceConfig", "ncclBroadcastConfig"), 23200),
    **dict.fromkeys(("ncclAllGatherConfig", "ncclReduceScatterConfig", "ncclAlltoAllConfig"), 23200),
    **dict.fromkeys(("ncclGatherConfig", "ncclScatterConfig"), 23200),
}
# In RCCL only, with the version of NCCL that its first release with the function says it is.
RCCL_SINCE = {
    "ncclAllToAll": 0,
    "ncclAllToAllv": 0,
    "ncclAlltoAllv": 22800,
    "ncclGather": 0,
    "ncclScatter": 0,
}


class NoCompiler(RuntimeError):
    """There is nothing here that compiles C++; the text says what was looked for."""


def compiler() -> list[str]:
    """$CXX, else c++, g++ or clang++; raises NoCompiler."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    raise NoCompiler("no C++ compiler: set CXX, or install c++, g++ or clang++")


def absent(version: int, rccl: bool) -> list[str]:
    """The names that a library of this version has not."""
    since = SINCE | (RCCL_SINCE if rccl else dict.fromkeys(RCCL_SINCE.keys() - SINCE.keys(), LATEST + 1))
    return sorted(name for name, first in since.items() if version < first)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the mock does not compile:\n{shlex.join(command)}\n{done.stderr}")


def _link(folder: Path, command: list[str], version: int, rccl: bool) -> Path:
    name = f"lib{'rccl' if rccl else 'nccl'}_mock.so"
    path = folder / str(version) / name
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    script, part = path.with_suffix(".map"), path.with_suffix(".part")
    names = "".join(f"{name}; " for name in absent(version, rccl))
    script.write_text(f"{{ global: nccl*; mock_*; local: {names}*; }};\n")
    played = [f"-DMOCK_VERSION={version}", f"-DMOCK_RCCL={int(rccl)}", str(HERE / "version.cpp")]
    objects = [str(o) for o in sorted(folder.glob("*.o"))]
    link = ["-shared", f"-Wl,--version-script={script},-soname,{name},-z,nodelete", "-o", str(part), "-lrt"]
    _run([*command, *played, *objects, *link])
    return part.rename(path)


def library(version: int = LATEST, rccl: bool = False, sanitize: str = "") -> Path:
    """The library's path, compiled if this source has not been; `version` is NCCL's code, 22105 for 2.21.5.

    Raises NoCompiler, or RuntimeError with the compiler's output.
    """
    command = [*compiler(), *FLAGS, *([f"-fsanitize={sanitize}"] if sanitize else [])]
    key = hashlib.sha256(" ".join(command).encode())
    for path in sorted([*HERE.glob("*.[ch]pp"), Path(__file__)]):
        key.update(path.read_bytes())
    root = Path(tempfile.gettempdir()) / f"unicomm-nccl-mock-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise RuntimeError(f"{root} belongs to somebody else; set TMPDIR to a folder of your own")
    folder = root / key.hexdigest()[:20]
    folder.mkdir(exist_ok=True)
    compiled = folder / "compiled"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several test processes compiles
        if not compiled.exists():
            # In one piece, because most of the time goes into the headers; only the reductions are hot.
            others = sorted(set(HERE.glob("*.cpp")) - {HERE / "version.cpp", HERE / "reduce.cpp"})
            whole = folder / "whole.cpp"
            whole.write_text("".join(f'#include "{path}"\n' for path in others))
            parts = [["-O0", str(whole)], ["-O2", str(HERE / "reduce.cpp")]]
            commands = [[*command, *p, "-c", "-o", str(folder / f"{Path(p[1]).stem}.o")] for p in parts]
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(_run, commands))
            compiled.touch()
        return _link(folder, command, version, rccl)


if __name__ == "__main__":
    print(library())
