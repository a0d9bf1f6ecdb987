"""Building csrc/rocshmem: the unit that provides a table of symmetric memory over the user's rocSHMEM.

AMD ships rocSHMEM as a static library with device code, which only the user's hipcc can link. The result is a
shared object in the user's cache, which `_core.symm_library` opens. Its name has a hash of its sources.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from unicomm import _core

from .build_cache import BuildError, building, cache_folder, install, version_of_files

# The sources that the core was built from; they are installed beside it.
_SOURCES = Path(_core.__file__).parent / "csrc"
_UNIT = _SOURCES / "rocshmem" / "unit.hip.cpp"
_SYSTEM, _USR = Path("/opt/rocm"), Path("/usr")
_TARGET = re.compile(r"\bgfx[0-9a-f]{3,}\b")


def unit_path() -> Path:
    """Returns the file of the unit for these sources, whether or not it exists."""
    files = sorted(path for path in _SOURCES.rglob("*") if path.is_file())
    name = f"unicomm_rocshmem-{version_of_files(files)}.so"
    return cache_folder() / f"rocshmem-{platform.machine()}" / name


@dataclasses.dataclass(frozen=True)
class BuiltUnit:
    """A built unit: its file, and the versions and GPU targets that it was built with."""

    path: str
    rocshmem: str
    hipcc: str
    targets: list[str]


def built_unit() -> BuiltUnit | None:
    """Returns the existing unit, or None."""
    path = unit_path()
    try:
        return BuiltUnit(**json.loads(path.with_suffix(".json").read_text())) if path.exists() else None
    except (OSError, ValueError, TypeError):
        return None


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools and libraries that a build uses."""

    hipcc: list[str]
    rocm: Path
    rocshmem: Path
    library: Path
    version: str
    targets: list[str]
    mpi_compile: list[str]
    mpi_link: list[str]

    def commands(self, output: Path) -> list[list[str]]:
        """Returns the compiler's command lines that write `output`. They need `HIP_PLATFORM=amd`."""
        targets = [f"--offload-arch={target}" for target in self.targets]
        unit = output.with_suffix(".o")
        # The compiler searches the system's folders last. Named here, they would be searched too early.
        folders = [_SOURCES, *(p / "include" for p in (self.rocshmem, self.rocm) if p != _USR)]
        rocm = [f"-L{self.rocm / 'lib'}", f"-Wl,-rpath,{self.rocm / 'lib'}"] if self.rocm != _USR else []
        compile_ = [
            *(*self.hipcc, "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fgpu-rdc"),
            *("-Wno-deprecated-declarations", *targets),
            *(f"-I{folder}" for folder in folders),
            *(*self.mpi_compile, "-c", str(_UNIT), "-o", str(unit)),
        ]
        link = [
            *(*self.hipcc, "-fgpu-rdc", "--hip-link", "-shared", *targets, str(unit), str(self.library)),
            *(*self.mpi_link, *rocm, "-lamdhip64", "-lhsa-runtime64"),
            *(*shlex.split(os.environ.get("LDFLAGS", "")), "-o", str(output)),
        ]
        return [compile_, link]


def find_tools(rocshmem: Path | None = None, targets: Sequence[str] = (), mpi: Path | None = None) -> Tools:
    """Finds hipcc, rocSHMEM, the GPUs' targets and, if rocSHMEM needs it, MPI. Raises `BuildError`."""
    hipcc = _find_hipcc(os.environ)
    given = os.environ.get("ROCM_PATH")
    compiler = Path(shutil.which(hipcc[0]) or hipcc[0]).resolve()
    rocm = Path(given) if given else compiler.parent.parent
    prefix, library = _find_rocshmem(rocshmem, rocm)
    headers = _Headers(prefix)
    return Tools(
        hipcc,
        rocm,
        prefix,
        library,
        headers.version,
        _choose_targets(list(targets), headers.targets, rocm),
        *(_find_mpi(mpi, headers.version) if headers.needs_mpi else ([], [])),
    )


def build(tools: Tools, say: Callable[[str], None]) -> Path:
    """Compiles, links, opens and installs the unit. Passes each command to `say`. Raises `BuildError`."""
    target = unit_path()
    with building(target), tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / target.name
        for command in tools.commands(output):
            say(shlex.join(command))
            done = _run(command)
            if done.returncode != 0:
                raise BuildError(
                    f"{command[0]} failed with {done.returncode} for rocSHMEM {tools.version} in "
                    f"{tools.rocshmem}:\n{(done.stderr or done.stdout)[-3000:]}"
                )
        try:
            _core.symm_library(str(output))
        except OSError as error:
            raise BuildError(
                f"the built unit does not load: {error}; LDFLAGS may name libraries that rocSHMEM needs"
            ) from None
        version = _run([*tools.hipcc, "--version"]).stdout.strip().splitlines()
        facts = BuiltUnit(str(target), tools.version, version[0] if version else "unknown", tools.targets)
        target.unlink(missing_ok=True)  # never a unit beside the facts of another build
        target.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(facts)))
        install(output, target)
    return target


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # Without HIP_PLATFORM, hipcc chooses nvcc if that is installed too.
    environment = os.environ | {"HIP_PLATFORM": "amd"}
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from None


def _find_hipcc(environ: Mapping[str, str]) -> list[str]:
    if chosen := shlex.split(environ.get("HIPCC", "")):
        if not shutil.which(chosen[0]):
            raise BuildError(f"HIPCC names {chosen[0]}, which does not exist")
        return chosen
    rocm = environ.get("ROCM_PATH")
    places = [Path(rocm) / "bin" / "hipcc"] if rocm else []
    for place in [*places, Path("hipcc"), _SYSTEM / "bin" / "hipcc"]:
        if found := shutil.which(str(place)):
            return [found]
    raise BuildError("no hipcc: install ROCm's HIP compiler, or name it in HIPCC, or its folder in ROCM_PATH")


def _find_rocshmem(given: Path | None, rocm: Path) -> tuple[Path, Path]:
    """Returns the folder and the library file of rocSHMEM."""
    home = os.environ.get("ROCSHMEM_HOME")
    if given is not None or home:
        places = [given or Path(home or "")]
    else:
        places = list(dict.fromkeys([rocm, _SYSTEM]))
    for prefix in places:
        if not (prefix / "include" / "rocshmem" / "rocshmem.hpp").exists():
            continue
        for folder in ("lib", "lib64"):
            for name in ("librocshmem.a", "librocshmem.so"):
                if (library := prefix / folder / name).exists():
                    return prefix, library
        raise BuildError(f"rocSHMEM's headers are in {prefix}, but no lib/librocshmem.a")
    looked = ", ".join(str(prefix) for prefix in places)
    raise BuildError(
        f"no rocSHMEM in {looked}: install the package rocshmem-dev of ROCm 6.4 or later (or build it with "
        "-DCMAKE_POSITION_INDEPENDENT_CODE=ON) and name its folder in ROCSHMEM_HOME or by --rocshmem"
    )


class _Headers:
    """How rocSHMEM was built, by its headers."""

    def __init__(self, prefix: Path) -> None:
        folder = prefix / "include" / "rocshmem"
        main = (folder / "rocshmem.hpp").read_text(errors="replace")
        config = folder / "rocshmem_config.h"
        more = config.read_text(errors="replace") if config.exists() else ""
        found = re.search(r'ROCSHMEM_VERSION\s+"([^"]+)"', more) or re.search(
            r'VERSION\[\]\s*=\s*"([^"]+)"', main
        )
        self.version = found[1] if found else "of unknown version"
        # The GPU targets of its device code, which not all versions name.
        built_for = re.search(r'ROCSHMEM_OFFLOAD_TARGETS\s+"([^"]*)"', more)
        self.targets = _TARGET.findall(built_for[1]) if built_for else []
        # From 3.1 on, MPI is an option that is loaded at run time.
        by_option = "HAVE_EXTERNAL_MPI" in main
        includes = re.search(r'#include\s*[<"](mpi\.h|rocshmem_mpi\.hpp)', main) is not None
        self.needs_mpi = (
            re.search(r"#define\s+HAVE_EXTERNAL_MPI", more) is not None if by_option else includes
        )


def _choose_targets(given: list[str], library: list[str], rocm: Path) -> list[str]:
    targets = given or _targets_here(rocm)
    if not targets:
        example = library[-1] if library else "gfx942"
        raise BuildError(f"no AMD GPU was found here: name the target, such as --offload-arch {example}")
    for target in targets:
        if not _TARGET.fullmatch(target.partition(":")[0]):
            raise BuildError(f"{target!r} is not a GPU target such as gfx942: rocminfo shows those here")
        if library and target.partition(":")[0] not in library:
            raise BuildError(
                f"this rocSHMEM has no code for {target}, only for {', '.join(library)}: build it with "
                f"{target} in GPU_TARGETS, or choose one of them by --offload-arch"
            )
    return targets


def _targets_here(rocm: Path) -> list[str]:
    """Returns the targets of this machine's GPUs, each once."""
    for name in (
        "lib/llvm/bin/amdgpu-arch",
        "llvm/bin/amdgpu-arch",
        "bin/rocm_agent_enumerator",
        "bin/rocminfo",
    ):
        tool = shutil.which(str(rocm / name)) or shutil.which(Path(name).name)
        if tool is None:
            continue
        found = _TARGET.findall(_run([tool]).stdout)
        targets = list(dict.fromkeys(target for target in found if target != "gfx000"))  # gfx000 is a CPU
        if targets:
            return targets
    return []


def _find_mpi(given: Path | None, version: str) -> tuple[list[str], list[str]]:
    """Returns the compiler's options for MPI: to compile, and to link."""
    if given is not None:
        if not (given / "include" / "mpi.h").exists():
            raise BuildError(f"no MPI in {given}: include/mpi.h is missing")
        lib = given / "lib"
        return [f"-I{given / 'include'}"], [f"-L{lib}", f"-Wl,-rpath,{lib}", "-lmpi"]
    if wrapper := shutil.which("mpicc"):
        for questions in (("--showme:compile", "--showme:link"), ("-compile_info", "-link_info")):
            answers = [_run([wrapper, question]) for question in questions]
            if all(answer.returncode == 0 for answer in answers):
                first, second = (_flags(answer.stdout) for answer in answers)
                return first, second
    raise BuildError(
        f"rocSHMEM {version} was built with MPI, and there is no mpicc: install the one that it was built "
        "with, or name its folder by --mpi"
    )


def _flags(text: str) -> list[str]:
    return [word for word in shlex.split(text) if word.startswith(("-I", "-L", "-l", "-Wl,"))]
