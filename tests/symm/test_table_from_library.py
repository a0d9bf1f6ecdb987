"""A table that a shared object of another build exports: `_core.symm_library`."""

import shutil
import subprocess

import pytest

from tests import ROOT
from unicomm import _core, symm

CSRC = ROOT / "csrc"

# Memory of one process that plays its only PE.
ALONE = """
#include <cstdlib>
#include <cstring>
#include "symm/table.hpp"
using namespace unicomm::symm;
namespace {
int make(int world, uint64_t, UniqueId* out, Error* e) {
    std::memset(out, world, sizeof *out);
    if (world == 1) return 0;
    std::strcpy(e->detail, "plays one PE");
    return 5;
}
int join(const UniqueId*, int, int, const char*, uint64_t, Domain* out, Error*) {
    *out = std::malloc(1);
    return 0;
}
int left(Domain, Error*) { return 0; }
int end(Domain domain, Error*) { std::free(domain); return 0; }
int allocate(Domain, uint64_t bytes, uint64_t, uint64_t, void** out, Error*) {
    *out = std::calloc(bytes, 1);
    return 0;
}
int release(Domain, void* at, uint64_t, Error*) { std::free(at); return 0; }
int add(Domain, uint64_t* at, uint64_t value, int, uint64_t* before, Stream, Error*) {
    *before = *at;
    *at += value;
    return 0;
}
}
extern "C" const Vtbl* ENTRY(uint32_t abi) {
    static Vtbl table = [] {
        Vtbl t{};
        t.name = "alone", t.capabilities = ~uint64_t{0};  // more than it has
        t.unique_id = make, t.init = join, t.leave = left, t.release = end;
        t.allocate = allocate, t.free = release, t.fetch_add = add;
        return t;
    }();
    return abi == ABI ? &table : nullptr;
}
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    if not compiler:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("tables")

    def make(name, entry="unicomm_symm_table", abi="kTableAbi"):
        source, path = folder / f"{name}.cpp", folder / f"{name}.so"
        source.write_text(ALONE)
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{CSRC}", f"-DENTRY={entry}", f"-DABI={abi}"]
        subprocess.run([compiler, *flags, str(source), "-o", str(path)], check=True, timeout=100)
        return str(path)

    return make


def test_a_table_of_another_build(build):
    table = _core.symm_library(build("good"))
    assert table.name == "alone"
    # By the functions that are there, whatever the object says.
    assert symm.Capability(table.capabilities) == symm.Capability.HEAP | symm.Capability.ATOMICS
    fault, uid = table.unique_id(1, 0)
    assert (fault, uid) == (None, b"\1" * 128)
    assert table.unique_id(2, 0)[0][3] == "plays one PE"
    fault, domain = table.init(uid, 0, 1, "x", 1.0)
    assert fault is None
    fault, word = domain.allocate(8, 8, 1.0)
    assert fault is None
    assert domain.fetch_add(word, 5, 0, 0) == (None, 0)
    assert domain.fetch_add(word, 1, 0, 0) == (None, 5)
    assert domain.free(word, 1.0) is None
    with pytest.raises(AttributeError, match="the library has no put"):
        domain.put(word, word, 8, 0, 0)


def test_of_another_version(build):
    with pytest.raises(OSError, match="was built for another version of unicomm: build it again"):
        _core.symm_library(build("old", abi="1"))


def test_without_a_table(build, tmp_path):
    with pytest.raises(OSError, match="has no table of symmetric memory: no unicomm_symm_table in it"):
        _core.symm_library(build("other", entry="something_else"))
    nonsense = tmp_path / "nonsense.so"
    nonsense.write_bytes(b"no library " * 1000)
    with pytest.raises(OSError, match=r"nonsense\.so"):
        _core.symm_library(str(nonsense))
    with pytest.raises(OSError, match=r"not-there\.so"):
        _core.symm_library(str(tmp_path / "not-there.so"))


def test_the_version_is_the_list_of_functions(tmp_path):
    """Whoever changes a function's type or name in table.hpp changes the number."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if not compiler:
        pytest.skip("needs a C++ compiler")
    header = (CSRC / "symm" / "table.hpp").read_text()
    changed = header.replace("int(Domain, Stream, Error*))  /* orders", "int(Domain, Error*))  /* orders")
    assert changed != header
    numbers = []
    for name, text in (("same", header), ("changed", changed)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "table.hpp").write_text(text)
        (folder / "print.cpp").write_text(
            '#include "table.hpp"\n#include <cstdio>\n'
            'int main() { std::printf("%u", unicomm::symm::kTableAbi); }'
        )
        command = [compiler, "-std=c++20", str(folder / "print.cpp"), "-o", str(folder / "print")]
        subprocess.run(command, check=True, timeout=100)
        said = subprocess.run([str(folder / "print")], capture_output=True, check=True, timeout=10)
        numbers.append(int(said.stdout))
    assert numbers[0] == _core.symm_table_abi
    assert numbers[1] != _core.symm_table_abi
