"""The table over NVSHMEM, with processes over its mock."""

import shutil
import sys

import pytest

from tests.commands import run
from tests.mocks.nvshmem import build as build_nvshmem
from unicomm import _core

TIMEOUT = 1
_OLD, _NEW = 30405, 30800


def library(version=_NEW):
    try:
        return build_nvshmem.library(version)
    except build_nvshmem.NoCompiler as error:
        pytest.skip(str(error))


@pytest.mark.processes
@pytest.mark.parametrize(("n", "version"), [(2, _OLD), (4, _NEW)])
def test_what_the_table_does(start, n, version, tmp_path):
    log = tmp_path / "calls"
    job = start("nvshmem_table.py", n, library(version), "all", settings={"NVSHMEM_MOCK_LOG": str(log)})
    job.next("over")
    assert job.end() == [0] * n
    calls = [line.split() for line in log.read_text().splitlines()]
    made = [call for _, call, _ in calls]
    assert made.count("init") == 2 * n
    assert n <= made.count("finalize") <= 2 * n  # the second at the end of the processes
    assert made.count("team_destroy") >= n


@pytest.mark.processes
@pytest.mark.parametrize("version", [_OLD, _NEW])
def test_a_world_of_somebody_else_is_joined_and_left_to_its_owner(start, version, tmp_path):
    log = tmp_path / "calls"
    job = start("nvshmem_table.py", 2, library(version), "joined", settings={"NVSHMEM_MOCK_LOG": str(log)})
    job.next("over")
    assert job.end() == [0, 0]
    made = [line.split()[1] for line in log.read_text().splitlines()]
    assert made.count("init") == 2 * 3 + 1  # the owner's three worlds, and one of unicomm's own
    assert made.count("finalize") >= 2 * 2


@pytest.mark.processes
def test_for_a_communicator_of_nccl(start, mock_nccl_library):
    mock_nccl_library()
    job = start("nccl_over_nvshmem.py", 2, library(), settings={"NVSHMEM_MOCK_HOST_STREAM": "1"})
    assert [said["library"] for said in job.next("over", 60.0)] == ["NVSHMEM"] * 2
    assert job.end() == [0, 0]


@pytest.mark.processes
def test_several_pes_on_one_gpu(start):
    job = start("nvshmem_table.py", 2, library(), "limited", settings={"NVSHMEM_MOCK_LIMITED": "1"})
    job.next("over")
    assert job.end() == [0, 0]


@pytest.mark.processes
def test_who_waits_in_the_library_gives_up(start):
    job = start("nvshmem_table.py", 2, library(), "absent")
    first, _ = job.next("fault")
    assert first["first"] == TIMEOUT
    assert all("did not return in time" in text for text in first["later"])
    assert len(first["later"]) == 3


@pytest.mark.processes
@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"NVSHMEM_MOCK_REFUSES": "7"}, "nvshmemx_hostlib_init_attr failed with 7"),
        ({"NVSHMEM_MOCK_NO_DEVICE": "1"}, "found no GPU"),
    ],
)
def test_init_that_fails(start, setting, text):
    job = start("nvshmem_table.py", 1, library(), "limited", settings=setting)
    assert job[0].end() == 1
    assert text in job[0].complaints


def test_what_is_no_nvshmem():
    with pytest.raises(OSError, match="no-such-nvshmem"):
        _core.symm_nvshmem("libno-such-nvshmem.so")
    with pytest.raises(OSError, match="libno-such-nvshmem"):
        _core.symm_nvshmem("libno-such-nvshmem.so", True)
    with pytest.raises(OSError, match=r"is no NVSHMEM, or another one: it lacks nvshmemx_vendor_get"):
        _core.symm_nvshmem("libc.so.6")
    with pytest.raises(OSError, match=r"is NVSHMEM 2\.11\.0, whose interface is not known here"):
        _core.symm_nvshmem(str(library(21100)))


def test_a_second_nvshmem_is_refused(tmp_path):
    other = tmp_path / "libanother_nvshmem.so"
    shutil.copy(library(), other)
    program = (
        "import sys\n"
        "from unicomm import _core\n"
        "first, again = (_core.symm_nvshmem(sys.argv[1]) for _ in range(2))\n"
        "try:\n"
        "    _core.symm_nvshmem(sys.argv[2])\n"
        "except OSError as error:\n"
        "    print(first.name, again.name, error)\n"
    )
    command = [sys.executable, "-c", program, str(library()), str(other)]
    done = run(command)
    text = f"NVSHMEM NVSHMEM {other} would be this process's second NVSHMEM, after {library()}"
    assert done.stdout.strip() == text, done.stderr
