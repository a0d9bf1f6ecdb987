"""What a stranger can see of a process: its sockets, what they are for, and which library made them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands import clean_environment
from tests.mocks.nccl.build import NoCompiler
from tests.security import listeners, socket_owners
from tests.security.listeners import Listener

OPENS = """
import os, socket, sys
from pathlib import Path
from torch._C._distributed_c10d import TCPStore

folder = Path(sys.argv[1])
kept = []
for family, kind, address, listens in (
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0), True),
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0), False),  # bound, and answers nobody
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0), False),
    (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "listens"), True),
    (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "deaf"), False),
    (socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "messages"), False),
    (socket.AF_UNIX, socket.SOCK_STREAM, f"\\0{folder}", True),
):
    kept.append(socket.socket(family, kind))
    kept[-1].bind(address)
    if listens:
        kept[-1].listen()
kept.append(socket.socketpair())
connected = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
connected.connect(kept[2].getsockname())
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(kept[0].getsockname()[1], kept[2].getsockname()[1], store.port, flush=True)
sys.stdin.read()
"""


def test_sockets_of_each_kind_are_seen_with_the_library_that_made_them(tmp_path, monkeypatch):
    try:
        more = socket_owners.environment(tmp_path)
    except NoCompiler as error:
        pytest.skip(str(error))
    with subprocess.Popen(
        [sys.executable, "-c", OPENS, str(tmp_path)],
        env=clean_environment() | more,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        tcp, udp, store = map(int, process.stdout.readline().split())
        found = listeners.listeners([psutil.Process(process.pid)])
        process.communicate()
    mine = f"UNIX socket, {'private folder' if is_private(tmp_path) else 'private'}"
    seen = {(one.kind, one.address, one.port) for one in found if one.port != store}
    assert seen == {
        ("TCP", "127.0.0.1", tcp),
        ("UDP", "127.0.0.1", udp),
        (mine, str(tmp_path / "listens"), 0),
        (mine, str(tmp_path / "messages"), 0),
        ("UNIX socket, abstract", f"@{tmp_path}", 0),
    }
    [of_the_store] = [one for one in found if one.port == store]
    monkeypatch.setenv(socket_owners.TRACE, more[socket_owners.TRACE])
    owners = socket_owners.owners()
    assert owners[of_the_store.address, store].startswith("libtorch_cpu")
    for where in (("127.0.0.1", tcp), ("127.0.0.1", udp), (f"@{tmp_path}", 0)):
        assert "libtorch" not in owners[where]


def is_private(folder: Path) -> bool:
    return not all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents))


@pytest.mark.parametrize(
    ("kind", "address", "bound"),
    [
        ("TCP", "127.0.0.1", "loopback"),
        ("TCP", "::ffff:127.0.0.1", "loopback"),
        ("TCP", "::", "all addresses"),
        ("TCP", "10.77.0.1", "one address"),
        ("UDP", "0.0.0.0", "all addresses (UDP)"),
        ("UNIX socket, abstract", "@x", "UNIX socket, abstract"),
    ],
)
def test_how_a_socket_is_bound(kind, address, bound):
    assert Listener("rank", address, 1, kind).bound == bound


def silent() -> socket.socket:
    """A server that accepts no call: the kernel keeps callers waiting."""
    made = socket.create_server(("127.0.0.1", 0))
    made.settimeout(30)
    return made


@pytest.mark.parametrize(
    ("owner", "told"),
    [
        ("libucs.so.0", ("UCX's connections", "nothing")),
        ("libtorch_cpu.so", ("Gloo's connections", "nothing")),
        ("libprrte.so.3", ("Open MPI's launcher (PRRTE)", "unknown: strangers get no answer")),
        ("libnew.so", ("unknown: made by libnew.so", "unknown: strangers get no answer")),
        ("", ("unknown: made by ?", "unknown: strangers get no answer")),
    ],
)
def test_a_socket_that_keeps_silent_is_named_by_who_made_it(owner, told, monkeypatch):
    monkeypatch.setattr(listeners, "_SILENT", 0.2)
    with silent() as made:
        assert listeners.purpose(Listener("rank", *made.getsockname()), owner, False) == told


def test_what_no_caller_was_seen_to_be_refused_at_is_not_called_safe(monkeypatch):
    monkeypatch.setattr(listeners, "_SILENT", 0.2)
    with silent() as made:
        one = Listener("rank", *made.getsockname())
        assert listeners.purpose(one, "", True) == (listeners.OF_RANKS, listeners.NOT_SEEN)


def test_messages_without_a_connection_are_named_by_who_made_the_socket():
    one = Listener("rank", "10.77.0.1", 1, "UDP")
    assert listeners.purpose(one, "libnew.so", False) == ("unknown: made by libnew.so", "unknown")


def test_ranks_note_where_they_listen(tmp_path, monkeypatch):
    (tmp_path / "listens.1").write_text(json.dumps(["127.0.0.1", 5]))
    monkeypatch.setenv("HELD_CREATION", str(tmp_path))
    assert [path.name for path in listeners._noted()] == ["listens.1"]
    monkeypatch.delenv("HELD_CREATION")
    assert listeners._noted() == []
    assert os.getpid() in {process.pid for process in listeners._neighbours()}
