"""Where the ranks of a launcher meet when nobody passes a store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from tests.ports import free_port
from tests.threads import results
from unicomm.comms.errors import BackendError, CommTimeoutError, InvalidArgumentError
from unicomm.comms.membership import job_store, processes
from unicomm.comms.membership.environment import Environment
from unicomm.comms.membership.job_store import open_store


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No store of another test, and files in a folder of this one."""
    monkeypatch.setattr(job_store, "_slots", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def place(rank: int, size: int, local_size: int | None = None, source: str = "Open MPI") -> Environment:
    return Environment(rank, size, rank if local_size else None, local_size, source, "")


@pytest.fixture
def master() -> Any:
    """A TCPStore that torch.distributed hosts in this process, so to speak."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def address(port: int, **more: str) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}


def test_single_process_needs_no_store() -> None:
    assert open_store(place(0, 1), 1.0, address(1)) is None


def test_tcp_store_of_the_process(master: Any) -> None:
    # Rank 0 is to host it, beside the one that the process hosts at that address already.
    stores = results([partial(open_store, place(0, 2), 10.0, address(master.port))] * 8)
    assert all(isinstance(store, PrefixStore) for store in stores)
    assert all(store.underlying_store is stores[0].underlying_store for store in stores)
    stores[0].set("key", "value")
    assert master.get("unicomm/key") == b"value"


def reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=20).close()
        return True
    except ConnectionRefusedError:
        return False


@pytest.fixture
def own_address() -> str:
    """An address of this host that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no network but loopback")
        return str(probe.getsockname()[0])


def open_as_rank_0(host: str, more: dict[str, str], hosts: int = 1) -> int:
    address = host if host[0].isdigit() else "127.0.0.1"
    port = free_port("0.0.0.0" if "UNICOMM_STORE_LISTEN" in more else address)
    environ = {"MASTER_ADDR": host, "MASTER_PORT": str(port), **more}
    open_store(place(0, 2, 2 // hosts), 10.0, environ).set("key", "value")
    return port


def test_a_store_listens_at_its_address_alone(own_address: str) -> None:
    port = open_as_rank_0(own_address, {})
    assert reachable(own_address, port)
    assert not reachable("127.0.0.1", port)
    port = open_as_rank_0("localhost", {}, hosts=2)
    assert reachable("127.0.0.1", port)
    assert not reachable(own_address, port)


def test_a_store_listens_everywhere_when_told_so(own_address: str) -> None:
    port = open_as_rank_0(own_address, {"UNICOMM_STORE_LISTEN": "all"})
    assert reachable(own_address, port)
    assert reachable("127.0.0.1", port)


def test_a_name_that_is_loopback_at_home_does_not_lock_other_hosts_out(
    own_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts has the host's own name as 127.0.1.1."""
    resolve = socket.getaddrinfo

    def own_name(host: Any, *args: Any, **kwargs: Any) -> Any:
        return resolve("127.0.0.1" if host == "node17" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", own_name)
    port = free_port("127.0.0.1")
    listening = [job_store._listen(place(0, 2, local), "node17", port, "") for local in (1, 2)]
    assert listening[0] is None  # another host has ranks
    assert listening[1] is not None
    with socket.socket(fileno=listening[1]) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)


def test_an_address_of_another_machine_is_left_to_torch() -> None:
    assert job_store._listen(place(0, 2, 1), "198.51.100.1", 29500, "") is None  # as behind a NAT


def test_where_to_listen_is_checked_before_anything_is_opened() -> None:
    with pytest.raises(InvalidArgumentError, match="UNICOMM_STORE_LISTEN='everywhere' is neither"):
        open_store(place(0, 2), 1.0, address(1, UNICOMM_STORE_LISTEN="everywhere"))


def test_agent_store_keeps_the_attempts_apart(master: Any) -> None:
    def attempt(count: str, rank: int = 0) -> Any:
        run = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job"}
        environ = address(master.port, **run, TORCHELASTIC_RESTART_COUNT=count)
        return open_store(place(rank, 2), 10.0, environ)

    attempt("0").set("key", "old")
    assert attempt("0", rank=1).check(["key"])
    assert not attempt("1").check(["key"])
    # Nobody but the agent hosts it, not even rank 0.
    assert attempt("1").underlying_store.port == master.port
    assert "server=<nullptr>" in repr(attempt("1").underlying_store)


def test_rank_0_that_does_not_come() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # not listening: connections are refused
        port = reserved.getsockname()[1]
        with pytest.raises(CommTimeoutError, match=f"127.0.0.1:{port} within 0.2 s") as caught:
            open_store(place(1, 2), 0.2, address(port))
        assert caught.value.culprits == (0,)
        agent = address(port, TORCHELASTIC_USE_AGENT_STORE="True")
        with pytest.raises(BackendError, match="could not be reached") as lost:
            open_store(place(0, 2), 0.2, agent)
    assert "torchrun" in lost.value.hint


def test_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BackendError, match=f"127.0.0.1:{port} could not be opened") as caught:
            open_store(place(0, 2), 1.0, address(port))
    assert "MASTER_PORT" in caught.value.hint


@pytest.mark.parametrize(
    "environ",
    [
        {"MASTER_ADDR": "localhost"},
        {"MASTER_PORT": "1234"},
        {"MASTER_ADDR": "localhost", "MASTER_PORT": "http"},
        {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
        {"MASTER_ADDR": "localhost", "MASTER_PORT": "65536"},
    ],
)
def test_half_an_address(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"MASTER_ADDR='.*' and MASTER_PORT='.*'"):
        open_store(place(0, 2), 1.0, environ)


@pytest.mark.parametrize(
    "env",
    [
        place(0, 4, 2),
        place(0, 2),
        place(0, 2, 2, source="RANK/WORLD_SIZE"),
        place(0, 2, 2, source="TORCHCOMM_RANK"),
    ],
)
def test_nothing_to_meet_at(env: Environment) -> None:
    with pytest.raises(InvalidArgumentError, match="have no store to meet at") as caught:
        open_store(env, 1.0, {})
    assert "MASTER_ADDR" in caught.value.hint
    assert "store=" in caught.value.hint


def test_file_store_on_one_host(tmp_path: Path) -> None:
    store = open_store(place(0, 2, 2), 1.0, {})
    assert isinstance(store, FileStore)
    path = Path(store.path)
    assert path.parent.parent == tmp_path
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert open_store(place(1, 2, 2), 1.0, {}) is store
    other = open_store(place(0, 3, 3), 1.0, {})
    assert isinstance(other, FileStore)
    assert other.path != store.path


def test_files_of_dead_jobs_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / f"unicomm-stores-{os.getuid()}"
    folder.mkdir(mode=0o700)
    here = processes.scope()
    ticks = int(processes.status(os.getpid())[19])
    kept = [f"{here}-{os.getpid()}-{ticks}-job", f"{here}-0-0-job", f"{'0' * 16}-{os.getpid()}-1-job"]
    gone = [f"{here}-{os.getpid()}-{ticks + 1}-job"]  # another process had this id before
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    gone.append(f"{here}-{dead.pid}-{ticks}-job")
    for name in kept + gone:
        (folder / name).touch()
    store = open_store(place(0, 2, 2), 1.0, {})
    assert isinstance(store, FileStore)
    assert {p.name for p in folder.iterdir()} == {*kept, Path(store.path).name}


def test_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"unicomm-stores-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(BackendError, match="is not a private folder"):
        open_store(place(0, 2, 2), 1.0, {})


RANK = """
from unicomm.comms.membership.environment import detect_environment
from unicomm.comms.membership.job_store import open_store
from unicomm.comms.membership.rendezvous import meet
env = detect_environment()
store = open_store(env, 60.0)
with meet(store, "c", env.rank, env.size, timeout=60.0, hello={}) as rendezvous:
    print(rendezvous.exchange("who", str(env.rank).encode()))
"""


@pytest.mark.processes
def test_ranks_of_one_host_meet_and_leave_no_file(tmp_path: Path) -> None:
    """As under mpiexec, one of them below a shell of its own; this process is the launcher."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "OMPI_", "PMI", "TORCH"))}
    common = {
        **clean,
        "TMPDIR": str(tmp_path),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    common["PYTHONPATH"] = str(Path(job_store.__file__).parents[2])
    plain = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            command,
            env={**common, "OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r, command in enumerate([plain, ["sh", "-c", '"$0" "$@"; exit $?', *plain]])
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert outputs == ["[b'0', b'1']\n"] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]
    folder = tmp_path / f"unicomm-stores-{os.getuid()}"
    assert list(folder.iterdir()) == []
