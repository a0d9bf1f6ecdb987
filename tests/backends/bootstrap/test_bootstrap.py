"""Ranks on several hosts without MASTER_ADDR, over mock process managers (tests/backends/mpi: real ones)."""

from __future__ import annotations

import os
import socket
import threading
from functools import partial

import pytest

from tests.threads import results
from unicomm.backends.bootstrap import mpi_library, pmi, pmix
from unicomm.backends.bootstrap import store as bootstrap
from unicomm.comms.errors import BackendError, CommTimeoutError, InvalidArgumentError
from unicomm.comms.membership.environment import Environment

pytestmark = pytest.mark.timeout(120)

LIMIT = 60  # seconds: a hang, not a slow machine


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(bootstrap, "_stores", {})
    monkeypatch.setattr(pmi, "_used_up", set())


class MockPmi2:
    """Stands in for Slurm's PMI-2 server, for ranks that are threads: it has what the exchange needs."""

    def __init__(self, size: int) -> None:
        self.values: dict[str, str] = {}
        self.all_there = threading.Barrier(size)
        pairs = [socket.socketpair() for _ in range(size)]
        self.ours, self.theirs = zip(*pairs, strict=True)
        self.heard: list[list[str]] = [[] for _ in range(size)]
        self.threads = [
            threading.Thread(target=self.serve, args=(rank,), daemon=True) for rank in range(size)
        ]
        for thread in self.threads:
            thread.start()

    def serve(self, rank: int) -> None:
        with self.ours[rank].makefile("rwb", buffering=0) as stream:
            assert stream.readline() == b"cmd=init pmi_version=2 pmi_subversion=0\n"
            stream.write(b"cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n")
            while header := stream.read(6):
                said = b""
                while len(said) < int(header):
                    said += stream.read(int(header) - len(said))
                fields = dict(part.split("=", 1) for part in said.decode().rstrip(";").split(";"))
                command = fields.pop("cmd")
                self.heard[rank].append(command)
                answer = {"cmd": f"{command}-response", "rc": "0"}
                if command == "kvs-put":
                    self.values[fields["key"]] = fields["value"]
                elif command == "kvs-fence":
                    self.all_there.wait(LIMIT)
                elif command == "kvs-get":
                    answer |= {"found": "TRUE", "value": self.values[fields["key"]]}
                body = "".join(f"{name}={value};" for name, value in answer.items()).encode()
                stream.write(b"%6d" % len(body) + body)

    def close(self) -> None:
        for one in self.theirs:
            one.close()
        for thread in self.threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        for one in self.ours:
            one.close()


def test_pmi2_tells_all_ranks(monkeypatch):
    monkeypatch.setattr(pmi, "used_up", lambda: False)  # the ranks are threads of one process
    mock = MockPmi2(3)

    def rank(n: int) -> str:
        value = "10.0.0.1:5" if n == 0 else None
        return pmi.by_pmi2(str(mock.theirs[n].fileno()), "10.0", n, "where", value, LIMIT)

    told = results([partial(rank, n) for n in range(3)], within=LIMIT)
    mock.close()
    assert told == ["10.0.0.1:5"] * 3
    assert mock.heard[0] == ["fullinit", "kvs-put", "kvs-fence", "kvs-get", "finalize"]
    assert mock.heard[1] == ["fullinit", "kvs-fence", "kvs-get", "finalize"]


def slurm(descriptor: object, **more: str) -> tuple[Environment, dict[str, str]]:
    return Environment(1, 2, 0, 1, "PMI", ""), {
        "PMI_FD": str(descriptor),
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
        **more,
    }


GARBAGE = [
    (b"", "it hung up"),
    (b"\xff\xfe\n" * 3, ""),
    (b"x" * 10000, "more than 4096 characters"),
    (b"cmd=response rc=-1 msg=no\n" * 3, "'rc': '-1'"),
    (b"cmd=x kvsname=k value=nonsense\n" * 4, "is no address"),
    (b"cmd=x kvsname=k value=h:99999\n" * 4, "is no address"),
]
GARBAGE_2 = [
    (b"", "it hung up"),
    (b"cmd=response_to_init rc=0 pmi_version=1\n", "version 1"),
    (b"cmd=response_to_init rc=0 pmi_version=2\nabcdef", "where the length"),
    (b"cmd=response_to_init rc=0 pmi_version=2\n999999", "where the length"),
    (b"cmd=response_to_init rc=0 pmi_version=2\n    -1", "where the length"),
    (b"cmd=response_to_init rc=0 pmi_version=2\n    40cmd=", "it hung up"),
    (b"cmd=response_to_init rc=0 pmi_version=2\n     5\xff\xfe;;=", "to fullinit"),
    (b"cmd=response_to_init rc=0 pmi_version=2\n    28cmd=fullinit-response;rc=14;", "'rc': '14'"),
]


@pytest.mark.parametrize(
    ("job", "said", "words"), [("", *case) for case in GARBAGE] + [("10.0", *case) for case in GARBAGE_2]
)
def test_garbage_is_an_error(job, said, words):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(said)
        ours.shutdown(socket.SHUT_WR)
        world, environ = slurm(theirs.fileno(), **({"PMI_JOBID": job} if job else {}))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(BackendError, match="by the process manager") as raised:
            bootstrap.store_of_job(world, LIMIT, environ)
        assert words in str(raised.value)
        assert "set MASTER_ADDR to the host of rank 0" in raised.value.hint
        assert theirs.getblocking()
        assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("descriptor", ["", "x", "-1", "999999", "9" * 30])
def test_no_connection(descriptor):
    world, environ = slurm(descriptor)
    with pytest.raises(BackendError, match="by the process manager"):
        bootstrap.store_of_job(world, LIMIT, environ)


@pytest.mark.parametrize("job", ["", "10.0"])
def test_a_silent_manager(job):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        world, environ = slurm(theirs.fileno(), **({"PMI_JOBID": job} if job else {}))
        with pytest.raises(CommTimeoutError, match=r"within 0.05 s"):
            bootstrap.store_of_job(world, 0.05, environ)


def test_pmi2_leaves_no_place_for_mpi(monkeypatch):
    """Which is said before MPI_Init ends the process, and MPI is used where it is wanted."""
    world, environ = slurm("0", PMI_JOBID="10.0")
    monkeypatch.setattr(mpi_library, "installed", lambda: True)
    assert bootstrap._way(world, environ, uses_mpi=False) == "PMI-2"
    assert bootstrap._way(world, environ, uses_mpi=True) == "MPI"
    monkeypatch.setattr(pmi, "_used_up", {os.getpid()})
    monkeypatch.setattr(mpi_library, "running", lambda: None)
    with pytest.raises(RuntimeError, match="the backend 'mpi' first"):
        mpi_library._load()
    with pytest.raises(ValueError, match="has had it"):
        pmi.by_pmi2("0", "10.0", 1, "k", None, LIMIT)


def test_a_library_that_is_none(tmp_path, monkeypatch):
    """A file that does not load, and nothing else there; MPI is next, and here it is not installed."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libpmix.so.2").write_text("not a library")
    environ = {
        "PMIX_RANK": "1",
        "PMIX_NAMESPACE": "n",
        "PMIX_SERVER_URI2": "x",
        "OPAL_PREFIX": str(tmp_path),
    }
    monkeypatch.setattr(mpi_library, "installed", lambda: False)
    candidates = pmix._candidates(environ)
    assert candidates[0] == str(tmp_path / "lib" / "libpmix.so.2")
    monkeypatch.setattr(pmix, "_candidates", lambda environ: candidates[:1])
    world = Environment(1, 2, None, None, "Open MPI", "")
    with pytest.raises(BackendError, match="is not found, nor mpi4py"):
        bootstrap.store_of_job(world, LIMIT, environ)


def test_a_library_without_pmix(monkeypatch):
    monkeypatch.setattr(pmix, "_candidates", lambda environ: ["libm.so.6"])
    environ = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "n", "PMIX_SERVER_URI2": "x"}
    world = Environment(1, 2, None, None, "Slurm", "")
    with pytest.raises(BackendError, match="undefined symbol: PMIx_Init"):
        bootstrap.store_of_job(world, LIMIT, environ)


def test_a_launcher_with_nothing_to_meet_by(monkeypatch):
    """As before: what is missing is said, and MPI is not started where no MPI processes are."""
    monkeypatch.setattr(mpi_library, "installed", lambda: True)
    world = Environment(1, 2, 0, 1, "Slurm", "")
    for environ in ({}, {"SLURM_MPI_TYPE": "none"}, {"PMIX_RANK": "0", "PMIX_NAMESPACE": "outer"}):
        with pytest.raises(InvalidArgumentError, match="have no store to meet at"):
            bootstrap.store_of_job(world, LIMIT, environ)
