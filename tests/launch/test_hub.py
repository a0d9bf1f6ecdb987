"""The hub: its answers, its clients, and that no data on its socket can harm a job."""

import contextlib
import json
import os
import signal
import socket
import stat
import struct
import zlib
from pathlib import Path

import psutil
import pytest

pytest.importorskip("zmq", reason="the hub needs pyzmq")

import msgspec
import zmq
from typer.testing import CliRunner

from tests import ROOT
from unicomm import _core
from unicomm.flight_recorder.ring.reader import read_folder
from unicomm.launch import job_token
from unicomm.launch.cli import app
from unicomm.launch.hub import protocol, server
from unicomm.launch.hub import view as hub_view
from unicomm.launch.hub.gather import Room
from unicomm.launch.hub.hub_process import HubProcess
from unicomm.launch.hub.protocol import (
    Announce,
    Files,
    Gather,
    HubConnection,
    HubError,
    Look,
    Ping,
    Read,
    Tell,
    zmq_address,
)
from unicomm.launch.run import job_folder as run_folder
from unicomm.launch.side_process import SideProcess

TOKEN = "a token that nobody else has"
WITHIN = 60.0  # a hang, not a slow machine
META = json.dumps(
    {
        "ops": {"4": "all_reduce"},
        "host": "here",
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    }
)


class Hub:
    """A hub as the launcher starts it, with a folder of rings. `patient`: see patient_hub.py."""

    def __init__(self, folder, name, token=TOKEN, patient=False):
        self.folder = folder / name
        self.folder.mkdir()
        log = self.folder / "log"
        self.process = SideProcess("tests.launch.patient_hub", log) if patient else HubProcess(log)
        self.process.tell("open", token=token, address="127.0.0.1", port=0, others=True)
        said = self.process.wait("open", "closed", seconds=WITHIN)
        assert said is not None, self.log()
        self.port = said["port"]
        self.address = zmq_address("127.0.0.1", self.port)

    def start(self, number=0, host=0, hosts=1):
        """Ranks run now, for the `number`-th time; others know this start as `self.round`."""
        self.round, self.number = f"round {number} of {host}", number
        end = f"-{number}" if number else ""
        places = {name: str(self.folder / (name + end)) for name in ("rings", "frozen", "job")}
        self.rings = Path(places["rings"])
        self.rings.mkdir(exist_ok=True)
        self.process.tell("attempt", number=number, **places, host=host, hosts=hosts, round=self.round)

    def fail(self):
        self.process.tell("failed", number=self.number)
        assert self.process.wait("gathering", seconds=WITHIN, attempt=self.number)

    def gathered(self):
        return self.process.wait("gathered", "not gathered", seconds=WITHIN, attempt=self.number)

    def log(self):
        return (self.folder / "log").read_text()

    def ring(self, rank, world):
        """Makes this process play a rank that waits in its first all-reduce."""
        recorder = _core.Recorder(str(self.rings / f"{rank}.ucring"), META, rank, world, 64)
        recorder.add_comm("main", "shm", "u1", f"0-{world - 1}", rank, world)
        recorder.begin(0, 4, 1, 1, [], [], 1)
        return recorder


def start(several, number=0):
    """Ranks run now on these hosts, which know of each other."""
    for i, hub in enumerate(several):
        hub.start(number, i, len(several))
    known = [(i, hub.address, hub.round) for i, hub in enumerate(several[:3])]
    for hub in several:
        hub.process.tell("join", directories=known)


@pytest.fixture
def hubs(tmp_path, monkeypatch):
    """`hubs(n)`: `n` hubs that know each other. `patient`: for tests in which each of them has to answer."""
    made = []
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # where patient_hub.py is

    def make(n, token=TOKEN, patient=False):
        several = [Hub(tmp_path, f"host{len(made) + i}", token, patient) for i in range(n)]
        made.extend(several)
        start(several)
        return several

    yield make
    for hub in made:
        hub.process.close()
        assert hub.log() == "", hub.log()


@pytest.fixture
def ask():
    """`ask(hub, request)`: the hub's answer, on a connection of its own."""
    context = zmq.Context()

    def ask(hub, request, token=TOKEN, seconds=WITHIN):
        with HubConnection(context, hub.address, token) as connection:
            return connection.ask(request, seconds)

    yield ask
    context.destroy(0)


def test_the_rings_of_this_host_now(hubs, ask):
    [hub] = hubs(1)
    kept = [hub.ring(rank, 2) for rank in range(2)]
    answer = ask(hub, Look())
    assert answer.missing == []
    rings = hub_view.unpacked(answer.rings)
    assert [where.rpartition(":")[2] for where, _ in rings] == ["0.ucring", "1.ucring"]
    assert len(kept) == len(rings)


def test_all_hosts_by_any_of_them(hubs, ask, eventually):
    """The fourth hub does not know the others; the first three do."""
    several = hubs(4, patient=True)
    kept = [hub.ring(rank, 4) for rank, hub in enumerate(several)]
    for hub in several:
        answers = []

        def complete(hub=hub, answers=answers):
            answers.append(ask(hub, Look()))
            return len(answers[-1].rings) == len(kept)

        eventually(complete, WITHIN)
        assert answers[-1].missing == []


def test_gathering(hubs, ask, eventually):
    several = hubs(3, patient=True)
    kept = [hub.ring(rank, 3) for rank, hub in enumerate(several)]
    eventually(lambda: len(ask(several[0], Look()).rings) == len(kept), WITHIN)
    several[2].fail()
    said = several[2].gathered()
    assert said["say"] == "gathered", said
    assert (said["here"], said["hosts"], said["missing"]) == (False, 3, [])
    assert said["folder"] == str(several[0].folder / "job")
    rings, findings = read_folder(several[0].folder / "job")
    assert [ring.rank for ring in rings] == [0, 1, 2]
    assert all(ring.copied_as in ("running", "sleeping") for ring in rings)
    assert findings == []
    assert not list(several[0].folder.glob(".part*"))
    # Everybody has been told: the one that gathered may go before the others ask.
    several[0].process.close()
    several[1].fail()
    assert several[1].gathered()["folder"] == said["folder"]


def test_hosts_that_do_not_answer(hubs, ask, eventually):
    """When the first hub does not answer, the next one gathers, and names the missing hosts."""
    several = hubs(3)
    kept = [hub.ring(rank, 3) for rank, hub in enumerate(several)]
    eventually(lambda: len(ask(several[1], Look()).rings) == len(kept), WITHIN)
    os.kill(several[0].process.pid, signal.SIGSTOP)
    several[2].fail()
    said = several[2].gathered()
    assert said["say"] == "gathered", said
    assert said["folder"] == str(several[1].folder / "job")
    assert said["hosts"] == 2
    assert [ring.rank for ring in read_folder(said["folder"])[0]] == [1, 2]
    [missing] = said["missing"]
    assert "did not answer" in missing


def test_a_new_start_has_verdicts_of_its_own(hubs, ask, eventually):
    """What is asked, told or found for an earlier one changes nothing."""
    first, second = several = hubs(2, patient=True)
    kept = [hub.ring(rank, 2) for rank, hub in enumerate(several)]
    eventually(lambda: len(ask(first, Look()).rings) == 2, WITHIN)
    second.fail()
    before, rounds = second.gathered(), [hub.round for hub in several]
    start(several, 1)
    kept.append(first.ring(0, 1))
    eventually(lambda: len(ask(first, Look()).rings) == 1, WITHIN)
    found = protocol.Gathered("here", "elsewhere", 2, [], "an old finding")
    for request in (Gather(rounds[0]), Files(rounds[0]), Tell(rounds[0], found)):
        for hub in several:
            with pytest.raises(HubError, match="another start"):
                ask(hub, request)
    second.process.tell("failed", number=0)
    second.fail()
    after = second.gathered()
    assert (before["folder"], after["folder"]) == (str(first.folder / "job"), str(first.folder / "job-1"))
    assert [ring.rank for ring in read_folder(after["folder"])[0]] == [0]
    assert after["sentence"] != before["sentence"]
    assert second.process.wait("gathered", seconds=0, attempt=0) == before


def test_hosts_that_are_not_known_yet_are_missed(hubs):
    [hub] = hubs(1)
    kept = hub.ring(0, 2)
    hub.start(1, 0, 3)
    hub.fail()
    said = hub.gathered()
    assert said["missing"] == ["2 of 3 hosts have no hub, or one that is not known here"]
    del kept


def test_all_hosts_may_ask_for_the_rings_at_once(hubs):
    [hub] = hubs(1)
    kept = hub.ring(0, 1)
    context = zmq.Context()
    guests = [connected(context, hub.address) for _ in range(100)]
    for guest in guests:
        guest.send(protocol.encode(Gather(hub.round)))
    answers = []
    for guest in guests:
        assert guest.poll(WITHIN * 1000)
        answers.append(protocol.read_answer(guest.recv(), hub.address))
    assert {type(answer) for answer in answers} == {protocol.Gathered}
    context.destroy(0)
    del kept


def test_many_hosts_that_are_gone_are_missed_together(hubs, ask):
    """Each alone takes two seconds."""
    [hub] = hubs(1)
    kept = hub.ring(0, 1)
    for host in range(1, 600):
        ask(hub, Announce(host, f"tcp://127.0.0.1:{host}", f"host{host}", hub.round))
    answer = ask(hub, Look())
    assert len(answer.rings) == 1
    assert len(answer.missing) == 599
    del kept


def test_room_is_for_all_files_of_a_host_or_none():
    room = Room(100)
    room.take([60, 20])
    for sizes in ([10, 11], [21], [-1], [protocol.MOST_RING + 1]):
        with pytest.raises(HubError, match=r"too large: -?[0-9]* bytes, and room is left for 20"):
            room.take(sizes)
    room.take([20])


def test_a_hub_that_is_gone_or_stopped_delays_nobody(hubs, eventually):
    first, second = hubs(2)
    os.kill(first.process.pid, signal.SIGKILL)
    eventually(lambda: first.process.wait("open", seconds=0) and first.process.gone, WITHIN)
    os.kill(second.process.pid, signal.SIGSTOP)
    for hub in (first, second):
        for _ in range(3000):  # more than a pipe takes
            hub.process.tell("note", what="x" * 100)
        assert hub.process.wait("gathering", seconds=0.01) is None


def test_who_does_not_know_the_token(hubs, ask):
    [hub] = hubs(1)
    for token in ("another token than the right one", "x" * 16):
        with pytest.raises(HubError, match="another token"):
            ask(hub, Ping(), token=token, seconds=1.0)
    # The right server's key, but a guest's that anybody could have made.
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.curve_serverkey = protocol.keys(TOKEN, "hub")[0]
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.connect(hub.address)
    stranger.send(protocol.encode(Ping()))
    assert not stranger.poll(500)
    plain = context.socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(hub.address)
    plain.send(protocol.encode(Ping()))
    assert not plain.poll(500)
    context.destroy(0)
    assert isinstance(ask(hub, Ping()), protocol.Done)


# ZeroMQ's greeting: signature, version 3.0, mechanism, as server or not, filler.
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
_NULL = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_GARBAGE = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "random": os.urandom(1 << 16),
    "no mechanism": _NULL + b"\x04\x05READY",
    "a command without end": _GREETING + b"\x06" + struct.pack(">Q", 1 << 62),
    "a message of 2 GiB": _GREETING + b"\x02" + struct.pack(">Q", 2 << 30) + bytes(4096),
    "half a hello": _GREETING + b"\x04\xc8\x05HELLO\x01\x00" + bytes(20),
    "a wrong hello": _GREETING + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
}


def test_garbage(hubs, ask):
    [hub] = hubs(1)
    before = psutil.Process(hub.process.pid).memory_info().rss
    open_ones = []
    for data in _GARBAGE.values():
        for _ in range(5):
            stranger = socket.create_connection(("127.0.0.1", hub.port), WITHIN)
            open_ones.append(stranger)
            with contextlib.suppress(OSError):  # it hangs up early
                stranger.sendall(data)
        assert isinstance(ask(hub, Ping()), protocol.Done)
    for stranger in open_ones:
        stranger.close()
    assert isinstance(ask(hub, Ping()), protocol.Done)
    assert psutil.Process(hub.process.pid).memory_info().rss - before < 64 << 20


def connected(context, address):
    """A socket of one who knows the token."""
    guest = context.socket(zmq.DEALER)
    guest.linger = 0
    guest.curve_serverkey = protocol.keys(TOKEN, "hub")[0]
    guest.curve_publickey, guest.curve_secretkey = protocol.keys(TOKEN, "guest")
    guest.connect(address)
    return guest


def test_garbage_from_one_who_knows_the_token(hubs, ask):
    [hub] = hubs(1)
    context = zmq.Context()
    guest = connected(context, hub.address)
    refused = [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "Open"}), b"\x91" * 1000, bytes(60000)]
    refused += [msgspec.msgpack.encode({"type": "Read", "name": 3, "offset": "x"})]
    refused += [msgspec.msgpack.encode(Read("", "name", 0)).replace(b"\xa4name", b"\xa4n\xff\xffe")]
    for data in refused:
        guest.send(data)
        assert guest.poll(WITHIN * 1000), data
        answer = msgspec.msgpack.decode(guest.recv())
        assert answer["type"] == "Refused", (data, answer)
    guest.send_multipart([b"several", b"frames"])
    guest.send(bytes(1 << 20))  # more than a request may have: the connection ends
    assert isinstance(ask(hub, Ping()), protocol.Done)
    context.destroy(0)


@pytest.mark.parametrize("turn", range(10))  # libzmq counts the answers again if a turn takes a millisecond
def test_answers_that_the_client_has_taken_leave_room_for_more(turn):
    """As many fast requests as the hub finds without waiting: each is answered, however small its queue."""
    hub, context, answers = server.Hub(lambda _: None), zmq.Context(), []
    hub.open(TOKEN, "127.0.0.1", 0, True)
    router = hub._router
    guest = connected(context, hub._address)
    for _ in range(3 * router.sndhwm):
        guest.send(protocol.encode(Ping()))
    assert router.poll(WITHIN * 1000)
    for _ in range(3 * router.sndhwm):
        while True:
            try:
                hub._received(router.recv_multipart(zmq.NOBLOCK))
                break
            except zmq.Again:
                assert router.poll(WITHIN * 1000)
        answers.append(guest.poll(WITHIN * 1000 / 6) and guest.recv())
        if not answers[-1]:
            break
    hub._authenticator.stop()
    for sockets in (context, hub._context):
        sockets.destroy(0)
    assert all(answers), f"no answer to request {len(answers)}"


def test_names_that_lead_elsewhere(hubs, ask):
    [hub] = hubs(1)
    ask(hub, Files(hub.round))
    for name in ("../../secret", "/etc/passwd", ".ucring", "a/b.ucring", "x.ucring\0", "x.txt", ""):
        with pytest.raises(HubError, match="not the name of a ring"):
            protocol.file_name(name)
        with pytest.raises(HubError, match="not the name of a ring"):
            ask(hub, Read(hub.round, name, 0))


def test_requests_that_make_no_sense(hubs, ask):
    [hub] = hubs(1)
    kept = hub.ring(0, 1)
    [(name, size)] = ask(hub, Files(hub.round)).files
    assert ask(hub, Read(hub.round, name, size + 5)).size == 0
    assert ask(hub, Read(hub.round, name, -5)).size == size
    with pytest.raises(HubError, match="refused"):
        ask(hub, Read(hub.round, "another.ucring", 0))
    for host in (-1, 1 << 40):
        with pytest.raises(HubError, match="there is no host number"):
            ask(hub, Announce(host, "tcp://127.0.0.1:1", "x", hub.round))
    assert ask(hub, Gather(hub.round)).hosts == 1
    # Peers that are none cost patience, and are named.
    ask(hub, Announce(5, "tcp://127.0.0.1:1", "liar", hub.round))
    ask(hub, Announce(6, "no address", "fool", hub.round))
    answer = ask(hub, Look())
    assert len(answer.rings) == 1
    assert sorted(text.partition(":")[0] for text in answer.missing) == ["fool", "liar"]
    del kept


def test_before_ranks_are_there(tmp_path, ask):
    process = HubProcess(tmp_path / "log")
    process.tell("open", token=TOKEN, address="127.0.0.1", port=0, others=True)
    port = process.wait("open", "closed", seconds=WITHIN)["port"]
    hub = type("Hub", (), {"address": zmq_address("127.0.0.1", port)})
    with pytest.raises(HubError, match="no ranks were started yet"):
        ask(hub, Look())
    process.close()


def test_modules_of_the_job_that_have_names_of_pythons(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('the json of the job')")
    monkeypatch.chdir(tmp_path)
    process = HubProcess(tmp_path / "log")
    process.tell("open", token=TOKEN, address="127.0.0.1", port=0, others=True)
    assert process.wait("open", "closed", seconds=WITHIN)["say"] == "open", (tmp_path / "log").read_text()
    process.close()


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for others, say in ((False, "closed"), (True, "open")):
            process = HubProcess(tmp_path / say)
            process.tell("open", token=TOKEN, address="127.0.0.1", port=port, others=others)
            said = process.wait("open", "closed", seconds=WITHIN)
            assert said["say"] == say
            assert str(port) in said.get("why", str(port))
            process.close()


def test_unpacking_is_bounded():
    bomb = zlib.compress(bytes(64 << 20))
    with pytest.raises(HubError, match="more than"):
        protocol.unpack(bomb, 64 << 20, 1 << 20)
    with pytest.raises(HubError, match="not the 1000 bytes"):
        protocol.unpack(bomb, 1000, 1 << 20)
    with pytest.raises(HubError, match="not the 1000 bytes"):
        protocol.unpack(zlib.compress(b"x"), 1000, 1 << 20)
    with pytest.raises(HubError, match="damaged"):
        protocol.unpack(b"nonsense", 10, 1 << 20)
    with pytest.raises(HubError, match="more than"):
        protocol.unpack(b"", -1, 1 << 20)


def test_tokens():
    assert protocol.keys(TOKEN, "hub") == protocol.keys(TOKEN, "hub")
    assert len({protocol.keys(t, side) for t in (TOKEN, TOKEN + "x") for side in ("hub", "guest")}) == 4
    for weak in ("", "short", "ü" * 20):
        with pytest.raises(job_token.TokenError, match="openssl"):
            job_token.check_token(weak)
    assert job_token.check_token(job_token.new_token())


# --- unicomm trace top --connect ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("localhost", ("localhost", None)),
        ("node0:29401", ("node0", 29401)),
        ("10.0.0.1:5", ("10.0.0.1", 5)),
        ("[::1]:77", ("::1", 77)),
        ("[::1]", ("::1", None)),
        ("fe80::1", ("fe80::1", None)),
    ],
)
def test_hosts_and_ports(text, meant):
    assert hub_view.parse(text) == meant


@pytest.mark.parametrize("text", ["", ":5", "a:b", "a:0", "a:70000", "a:-1", "a:1e3"])
def test_no_hosts_and_ports(text):
    with pytest.raises(HubError, match="HOST"):
        hub_view.parse(text)


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """The folder with the notes of this user's hubs, for this test only."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(run_folder, "private_folder", lambda: tmp_path)
    monkeypatch.delenv(job_token.VARIABLE, raising=False)
    return tmp_path


def test_the_view_by_a_hub(hubs, notes, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(hub_view, "_PATIENCE", WITHIN)
    [hub] = hubs(1)
    kept = [hub.ring(rank, 3) for rank in range(2)]
    note = run_folder.note_hub("127.0.0.1", hub.port, TOKEN, hub.process.pid, hub.folder)
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    with hub_view.RemoteView("localhost") as view:
        [job] = view.take().jobs
        assert [(r.rank, r.waits_for) for r in job.ranks] == [(0, [2]), (1, [2]), (2, [])]
        assert all(r.host == "here" and r.pid == os.getpid() for r in job.ranks[:2])
        shown = CliRunner().invoke(app, ["trace", "top", "--connect", f"localhost:{hub.port}", "--once"])
        assert shown.exit_code == 0
        assert "all_reduce" in shown.stdout
        assert "held up: 0-1" in shown.stdout
        monkeypatch.setattr(hub_view, "_PATIENCE", 0.5)
        os.kill(hub.process.pid, signal.SIGSTOP)
        last = view.follow()
        assert last.jobs == [job]
        assert "did not answer" in last.findings[0].message
        os.kill(hub.process.pid, signal.SIGKILL)
        hub.process.close()
        with pytest.raises(hub_view.HubEndedError, match="has ended, as hubs do with their job"):
            view.follow()
        assert view.last is not None
        assert view.last.jobs == [job]
    del kept


def test_which_hub_is_meant(notes, monkeypatch):
    with pytest.raises(HubError, match="no job of"):
        hub_view.find("localhost", None)
    with pytest.raises(HubError, match=f"set {job_token.VARIABLE}"):
        hub_view.find("node7", None)
    here = os.getpid()
    run_folder.note_hub("10.0.0.1", 5001, "first token of two", here, notes)
    assert hub_view.find("localhost", None) == ("tcp://10.0.0.1:5001", "first token of two")
    assert hub_view.find("node7", 8) == ("tcp://node7:8", "first token of two")
    with pytest.raises(HubError, match="at port 9"):
        hub_view.find("localhost", 9)
    run_folder.note_hub("10.0.0.1", 5002, "second token of two", os.getppid(), notes)
    with pytest.raises(HubError, match=r"5001, 5002|5002, 5001"):
        hub_view.find("localhost", None)
    assert hub_view.find("localhost", 5002)[1] == "second token of two"
    with pytest.raises(HubError, match="several jobs"):
        hub_view.find("node7", None)
    monkeypatch.setenv(job_token.VARIABLE, "a token of the user")
    assert hub_view.find("::2", None) == (f"tcp://[::2]:{run_folder.DEFAULT_PORT}", "a token of the user")


def test_notes_of_hubs_that_are_gone_are_removed(notes):
    path = run_folder.note_hub("127.0.0.1", 1, TOKEN, os.getpid(), notes)
    path.write_text(path.read_text().replace('"ticks": ', '"ticks": 1'))
    (notes / "hub-7.json").write_text("{")
    assert list(run_folder.running_hubs()) == []
    assert not path.exists()


def test_a_folder_or_a_hub(tmp_path):
    shown = CliRunner().invoke(app, ["trace", "top", str(tmp_path), "--connect", "localhost"])
    assert shown.exit_code == 2


def test_a_hub_loads_no_torch(hubs):
    [hub] = hubs(1)
    mapped = Path(f"/proc/{hub.process.pid}/maps").read_text()
    assert "zmq" in mapped
    assert "libtorch" not in mapped
