"""What a peer claims is checked before memory is taken for it, and what it sends is never run."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.ports import free_port
from unicomm import AbortedError, BackendError, Communicator, MismatchError, PeerLostError, _core, objcol
from unicomm.comms.membership.rendezvous import meet
from unicomm.testing import run_ranks

LIES = [2**62, 2**63 - 1, -1, -(2**63)]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("claim", LIES)
@pytest.mark.parametrize("kind", ["all_gather", "gather", "broadcast", "scatter", "recv"])
def test_objects_of_absurd_sizes(kind, claim, backend, raised):
    """Rank 1 plays its part of the protocol by hand, and lies about its object's size."""

    def lie(comm: Communicator) -> None:
        size = torch.tensor([claim])
        with contextlib.suppress(AbortedError):  # the other one has it, and gives up before this returns
            if kind in ("all_gather", "gather"):
                comm.all_gather_single(torch.empty(2, dtype=torch.int64), size, False)
            elif kind in ("broadcast", "scatter"):
                comm.broadcast(torch.tensor([claim, 1]), 1, False)
            else:
                comm.send(size, 0, False)
        # The others have given up: that is all that it hears.
        error = raised(comm.barrier, False)
        assert isinstance(error, (AbortedError, PeerLostError)), repr(error)

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            return lie(comm)
        call: dict[str, Any] = {
            "all_gather": lambda: objcol.all_gather_object(comm, [None, None], "mine"),
            "gather": lambda: objcol.gather_object(comm, "mine", [None, None], 0),
            "broadcast": lambda: objcol.broadcast_object_list(comm, [None], 1),
            "scatter": lambda: objcol.scatter_object_list(comm, [None], None, 1),
            "recv": lambda: objcol.recv_object_list(comm, [None], 1),
        }
        error = raised(call[kind])
        assert type(error) is MismatchError, repr(error)
        assert error.culprits == (1,)
        assert f"rank 1 says that its object has {claim} bytes" in error.message
        assert comm.is_aborted()
        return None

    run_ranks(program, 2, backend=backend, timeout=60)


class Evil:
    """Its pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def disguises(payload: bytes) -> dict[str, bytes]:
    """The same pickle as an old file of torch, as a new one, and bare."""
    new = io.BytesIO()
    torch.save({"a": torch.ones(2)}, new)
    rebuilt = io.BytesIO()
    with zipfile.ZipFile(new) as source, zipfile.ZipFile(rebuilt, "w") as target:
        for name in source.namelist():
            target.writestr(name, payload if name.endswith("data.pkl") else source.read(name))
    old = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2) + payload
    return {"bare": payload, "new": rebuilt.getvalue(), "old": old}


@pytest.mark.parametrize("form", ["bare", "new", "old"])
def test_a_malicious_pickle_is_not_run(form, tmp_path, raised):
    target = tmp_path / "made by the pickle"
    data = torch.frombuffer(bytearray(disguises(pickle.dumps(Evil(target), 2))[form]), dtype=torch.uint8)

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 1:
            comm.send(torch.tensor([data.numel()]), 0, False)
            comm.send(data, 0, False)
            return
        error = raised(objcol.recv_object_list, comm, [None], 1)
        assert type(error) is MismatchError, repr(error)
        assert error.culprits == (1,)
        assert not target.exists()

    run_ranks(program, 2)
    pickle.loads(pickle.dumps(Evil(target), 2))
    assert target.is_dir(), "the pickle is not malicious: this test would prove nothing"


# --- shm headers ------------------------------------------------------------------------------------------


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def reopen(data: bytes, seals: int = SEALS) -> Any:
    """A segment with these bytes, as another process would offer it."""
    copy = os.memfd_create("unicomm-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(copy, data)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals)
        return _core.ShmSegment.open(os.getpid(), copy)
    finally:
        os.close(copy)


@pytest.fixture(scope="module")
def segment_bytes() -> bytes:
    segment = _core.ShmSegment(2, 4096, 4096)
    with open(f"/proc/self/fd/{segment.fd}", "rb") as file:
        return file.read()


def test_a_sound_copy_opens(segment_bytes):
    reopen(segment_bytes)


@pytest.mark.parametrize("bits", [1, 2, 64, 1 << 12, 1 << 31, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("offset", range(0, 32, 4))
def test_a_damaged_header_is_refused(offset, bits, segment_bytes):
    """Every word of the header, each before memory is mapped by it: no crash, whatever it says."""
    damaged = bytearray(segment_bytes)
    word = int.from_bytes(damaged[offset : offset + 4], "little")
    damaged[offset : offset + 4] = (word ^ bits).to_bytes(4, "little")
    with pytest.raises(OSError, match="no unicomm segment"):
        reopen(bytes(damaged))


@pytest.mark.parametrize("length", [0, 1, 31, 100, 4096])
def test_a_short_segment_is_refused(length, segment_bytes):
    with pytest.raises(OSError, match="no unicomm segment"):
        reopen(segment_bytes[:length])
    with pytest.raises(OSError, match="no unicomm segment"):
        reopen(segment_bytes + bytes(length or 4096))


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SEAL, SEALS & ~fcntl.F_SEAL_SHRINK])
def test_a_segment_that_may_shrink_is_refused(seals, segment_bytes):
    """A peer that cut it off later would end this process by SIGBUS."""
    with pytest.raises(OSError, match="no unicomm segment"):
        reopen(segment_bytes, seals)


def test_the_own_files_cannot_change_their_size():
    segment = _core.ShmSegment(2, 4096, 4096)
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)


def test_a_strange_file_is_refused_without_being_opened(tmp_path):
    """To open a pipe without a writer blocks; to open one with a writer, and to close it, tells that one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = tmp_path / "memfd:unicomm"
    path.write_bytes(bytes(8192))
    files = [os.open(pipe, os.O_RDWR), os.open("/dev/zero", os.O_RDWR), os.open(path, os.O_RDWR)]
    try:
        for fd in files:
            with pytest.raises(OSError, match="no unicomm segment"):
                _core.ShmSegment.open(os.getpid(), fd)
    finally:
        for fd in files:
            os.close(fd)
    with pytest.raises(OSError, match="cannot open the unicomm segment"):
        _core.ShmSegment.open(os.getpid(), files[0])


def test_a_segment_for_another_number_of_ranks_is_refused():
    segment = _core.ShmSegment(3, 4096, 4096)
    for rank, pids in [(0, [os.getpid()] * 2), (3, [os.getpid()] * 3), (-1, [os.getpid()] * 3)]:
        with pytest.raises(OSError, match="for 3 ranks"):
            _core.ShmGroup(segment, rank, pids)


# --- the rendezvous ---------------------------------------------------------------------------------------

LYING_OUTCOMES = {
    "parts": b"*999999999999999999",
    "negative parts": b"*-5",
    "no number": b"*x",
    "a range of all numbers": b'-{"kind": "twice", "culprits": [[0, 4611686018427387904]]}',
    "ranks of a text": b'-{"kind": "twice", "culprits": "0-1"}',
    "no kind": b"-{}",
    "nested": b"-" + b"[" * 100_000,
    "no JSON": b"-\xff\xfe",
    "a mismatch of nothing": b'-{"kind": "mismatch", "culprits": [], "differences": 5}',
}


@pytest.mark.parametrize("lie", LYING_OUTCOMES)
def test_lies_in_the_store(lie, raised):
    store = HashStore()
    store.set("unicomm/name/world/generation", "0")
    # The first member of two posts; the outcome is somebody else's.
    original = store.compare_set

    class Lying:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def compare_set(self, key: str, old: Any, new: Any) -> bytes:
            asked = key.endswith("0/0/result") and old == new
            seen = asked and original(key.replace("result", "0"), "?", "?") != b"?"
            return LYING_OUTCOMES[lie] if seen else original(key, old, new)

    error = raised(meet, Lying(), "name", 0, 2, timeout=20.0, hello={})
    assert type(error) is BackendError, repr(error)
    assert "the store holds something that no member wrote" in error.message


# --- who may reach what -----------------------------------------------------------------------------------


def test_the_segment_is_private_and_has_no_name():
    segment = _core.ShmSegment(2, 4096, 4096)
    assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
    assert os.fstat(segment.fd).st_nlink == 0
    assert os.readlink(f"/proc/self/fd/{segment.fd}") == "/memfd:unicomm (deleted)"
    assert not os.get_inheritable(segment.fd)


def test_rings_are_private_and_have_random_names(tmp_path, monkeypatch):
    from unicomm.flight_recorder.ring.folder import ring_name, rings_folder

    names = {ring_name(0, 1) for _ in range(50)}
    assert len(names) == 50
    monkeypatch.delenv("UNICOMM_TRACE_DIR")
    folder = rings_folder()
    assert folder.stat().st_mode & 0o077 == 0
    ring = tmp_path / "ring"
    recorder = _core.Recorder(str(ring), "{}", 0, 1, 16)
    assert ring.stat().st_mode & 0o777 == 0o600
    recorder.close(True)


def test_gloo_listens_where_its_ranks_are():
    """Not to the world: at the one address that the ranks know each other by."""

    def program(comm: Communicator) -> list[str]:
        mesh = comm.unsafe_backend._check._sockets
        return [s.getsockname()[0] for s in mesh.values()]

    for addresses in run_ranks(program, 2, backend="gloo", hints={"hostname": "127.0.0.1"}):
        assert addresses == ["127.0.0.1"]


def test_the_store_of_one_host_is_not_open_to_others():
    """With MASTER_ADDR on loopback the store listens there alone; by itself torch's listens everywhere."""
    from unicomm.comms.membership.environment import Environment
    from unicomm.comms.membership.job_store import open_store

    port = free_port()
    world = Environment(rank=0, size=2, local_rank=0, local_size=2, source="environment", job="")
    store = open_store(world, 20.0, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert store is not None
    store.set("key", "value")
    assert store.get("key") == b"value"
    at = {line.split()[1] for line in listening(port)}
    assert at == {f"0100007F:{port:04X}"}


def listening(port: int) -> list[str]:
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [
        line for line in lines[1:] if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    ]
