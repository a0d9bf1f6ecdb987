"""For each kind of input, what reads it, and what has to hold afterwards.

A target takes the bytes of an input. It raises for a broken promise: any exception but the documented ones,
an exit code that a command does not have, output that is no JSON or controls the terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from . import mutations
from .limits import BrokenPromiseError, check_text, strict_json

MEMORY_GIB = 0.03  # that reading may need
PLANTED = "UNICOMM_FUZZ_PLANTED"  # a variable: whether dumps are read with a defect, for a test
_SELDOM = 8  # of as many inputs, one is read by a command, which takes as long as the rest


class _AtOnce(Executor):
    """Runs each function when it is submitted: starting threads takes longer than reading a small file."""

    def __init__(self, threads: int) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Room:
    """The folder of a process that fuzzes, with good files beside which a bad one is put. A context manager.

    While it is open, this process reads archives without threads, and none of the user's own rings and notes.
    """

    def __init__(self, seeds: Path) -> None:
        self._seeds = seeds

    def __enter__(self) -> Room:
        from unicomm.flight_recorder.table import load

        self.path = Path(tempfile.mkdtemp(prefix="unicomm-fuzz-"))
        self._before = load.ThreadPoolExecutor, dict(os.environ)
        load.ThreadPoolExecutor = _AtOnce  # type: ignore[misc,assignment]
        os.environ |= {"UNICOMM_TRACE_DIR": str(self.path / "none"), "XDG_RUNTIME_DIR": str(self.path)}
        os.environ |= {"COLUMNS": "120", "TERM": "dumb"}
        return self

    def __exit__(self, *_: object) -> None:
        from unicomm.flight_recorder.table import load

        load.ThreadPoolExecutor = self._before[0]  # type: ignore[misc]
        os.environ.clear()
        os.environ.update(self._before[1])
        shutil.rmtree(self.path, ignore_errors=True)

    def seed(self, target: str, number: int = 0) -> bytes:
        """Returns a good input."""
        return sorted((self._seeds / target).iterdir())[number].read_bytes()

    def folder(self, name: str, files: dict[str, bytes]) -> Path:
        """Returns a folder that holds exactly these files."""
        made = self.path / name
        made.mkdir(exist_ok=True)
        for path in made.iterdir():
            if path.name not in files:
                path.unlink()
        for file, data in files.items():
            (made / file).write_bytes(data)
        return made

    @cached_property
    def good(self) -> Path:
        """A folder of good dumps and a good trace, to compare and to merge with."""
        files = {"rank1.json": self.seed("dumps"), "trace1.json": _of_rank_1(self.seed("traces"))}
        return self.folder("good", files)


def _of_rank_1(trace: bytes) -> bytes:
    found = json.loads(trace)
    for group in found["unicomm"]["groups"]:
        group["rank"] = 1
    return json.dumps(found).encode()


# --- commands -------------------------------------------------------------------------------------------


_command: Any = None


def command(*words: object) -> tuple[int, str, str]:
    """Runs `unicomm ...` in this process. Returns its exit code, and what it printed on stdout and stderr."""
    global _command  # building it takes longer than most commands
    if _command is None:
        from typer.main import get_command

        from unicomm.launch.cli import app

        _command = get_command(app)
    out, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code: Any = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            _command.main([str(word) for word in words], "unicomm")
        except SystemExit as ended:
            code = ended.code
    texts = [stream.buffer.getvalue().decode() for stream in (out, errors)]  # type: ignore[attr-defined]
    return code, *texts  # type: ignore[return-value]


def check(*words: object, codes: Sequence[int] = (0, 1, 2), data: bool = False) -> int:
    """Runs a command and holds it to its promises; `data`: stdout is JSON unless nothing could be used."""
    code, out, errors = command(*words)
    if code not in codes:
        raise BrokenPromiseError(f"exit code {code}")
    for text in (out, errors):
        check_text(text)
    if code == 2 and not errors.strip():
        raise BrokenPromiseError("exit code 2 without a reason")
    if data and code != 2:
        strict_json(out)
    return code


def _check_page(path: Path) -> None:
    if path.exists():
        check_text(path.read_text().replace("\t", " ").replace("\r", " "))
        path.unlink()


def _chosen(one: int | None, often: list[Callable[[], object]], seldom: list[Callable[[], object]]) -> None:
    """Runs one of the functions that number `one` chooses, mostly one of `often`; all if it is None."""
    if one is None:
        several = often + seldom
    else:
        several = seldom if one % _SELDOM == 0 else often
        several = [several[one // _SELDOM % len(several)]]
    for run in several:
        run()


def _analyzed(room: Room, folder: Path, rings: bool, one: int | None) -> None:
    """Reads and analyzes a folder, and uses the result by functions and by commands; see `_chosen`."""
    from unicomm.flight_recorder.analysis.analyze import analyze
    from unicomm.flight_recorder.analysis.diff import compare
    from unicomm.flight_recorder.live import snapshot as live
    from unicomm.flight_recorder.metrics.openmetrics import text
    from unicomm.flight_recorder.metrics.samples import of_table
    from unicomm.flight_recorder.reports import rings_text
    from unicomm.flight_recorder.reports.report_data import shared, to_json
    from unicomm.flight_recorder.reports.report_html import write
    from unicomm.flight_recorder.reports.report_markdown import to_markdown
    from unicomm.flight_recorder.ring.reader import read_folder
    from unicomm.flight_recorder.table.load import load

    memory = int(MEMORY_GIB * (1 << 30))
    table = load([folder], memory=memory)
    for remark in table.remarks:
        check_text(remark.path + remark.message)
    report = None if table.empty else analyze(table)
    if report is not None:
        strict_json(to_json(report))
    page, packets = room.path / "out.html", room.path / "out.pftrace"
    trace, limit = ("trace",), ("--memory", MEMORY_GIB)
    often: list[Callable[[], object]] = [lambda: _figures(folder, memory)]
    if report is not None:
        often += [
            lambda: check_text(to_markdown(report, verbose=True)),
            lambda: strict_json(to_json(shared(report, table))),
            lambda: check_text(text(of_table(table, report).samples)),
            lambda: strict_json(json.dumps(compare(table, load([room.good], memory=memory)).as_data())),
            lambda: write(report, table, page),
        ]
    seldom: list[Callable[[], object]] = [
        lambda: check(*trace, "analyze", folder, "--json", *limit, data=True),
        lambda: check(*trace, "analyze", folder, "--verbose", *limit),
        lambda: check(*trace, "analyze", folder, "--markdown", "--share", "--verbose", *limit),
        lambda: check(*trace, "analyze", folder, "--perfetto", packets, *limit),
        lambda: check(*trace, "diff", room.good, folder, *limit),
        lambda: check(*trace, "export", folder, *limit, codes=(0, 2)),
        lambda: check(*trace, "export", folder, "--otlp", "-", *limit, codes=(0, 2), data=True),
        lambda: check("profile", "report", folder, *limit, codes=(0, 2)),
        lambda: check("profile", "report", folder, "--html", page, *limit, codes=(0, 2)),
    ]
    if rings:
        found, remarks = read_folder(folder)
        often += [
            lambda: strict_json(json.dumps(live.snapshot(found, remarks, everything=True).as_data())),
            lambda: strict_json(json.dumps(rings_text.as_data(found, remarks))),
            lambda: _served(folder),
        ]
        seldom += [
            lambda: check(*trace, "show", folder, codes=(0, 2)),
            lambda: check(*trace, "show", folder, "--raw", "--paths", codes=(0, 2)),
            lambda: check(*trace, "top", folder, "--once", "--all", codes=(0, 2)),
        ]
    _chosen(one, often, seldom)
    _check_page(page)


def _figures(folder: Path, memory: int) -> None:
    from unicomm.profiler import TraceError, figures

    with contextlib.suppress(TraceError):
        strict_json(figures.to_json(figures.report([folder], memory=memory)))


def _served(folder: Path) -> None:
    """Metrics while the ranks run, twice: what is new the second time counts on."""
    from unicomm.flight_recorder.metrics.openmetrics import text
    from unicomm.launch.exporter.followed_rings import FollowedRings

    rings, errors = FollowedRings(), io.StringIO()
    rings.follow(folder)
    with contextlib.redirect_stderr(errors):
        for _ in range(2):
            check_text(text(rings.samples()))
            rings._taken_at = -9.0
        rings._filling()
    if errors.getvalue():
        raise BrokenPromiseError(errors.getvalue()[:200])


# --- files ----------------------------------------------------------------------------------------------


def rings(room: Room, data: bytes, one: int | None) -> None:
    folder = room.folder("rings", {"a.ucring": data, "b.ucring": room.seed("rings", 1)})
    _analyzed(room, folder, True, one)
    from unicomm.flight_recorder.formats.torch_dump import to_dict
    from unicomm.flight_recorder.ring.copies import copied
    from unicomm.flight_recorder.ring.reader import Ring, RingError, read_ring

    with contextlib.suppress(RingError):
        json.dumps(to_dict(read_ring(data)))
        Ring(copied(data, "killed", 4))


def dumps(room: Room, data: bytes, one: int | None) -> None:
    if os.environ.get(PLANTED):
        _planted(data)
        return
    folder = room.folder("dumps", {"rank0.json": data, "rank1.json": room.seed("dumps", 2)})
    _analyzed(room, folder, False, one)


def _planted(data: bytes) -> None:
    """A reader with a defect: an operation has a state that nobody knows.

    A test sees by it that the fuzzer finds defects.
    """
    from unicomm.flight_recorder.formats.dump_columns import from_dump

    with contextlib.suppress(ValueError, RecursionError):
        if set(from_dump(json.loads(data)).states) - {"completed", "scheduled", "started", "failed", ""}:
            raise _PlantedError


class _PlantedError(Exception):
    pass


def pickles(room: Room, data: bytes, one: int | None) -> None:
    from unicomm.flight_recorder.formats.dump_columns import DumpError
    from unicomm.flight_recorder.formats.pickles import read

    with contextlib.suppress(DumpError):
        read(data)
    _analyzed(room, room.folder("pickles", {"nccl_trace_rank_0": data}), False, one)


def archives(room: Room, data: bytes, one: int | None) -> None:
    _analyzed(room, room.folder("archives", {"job.archive": data}), False, one)


def endings(room: Room, data: bytes, one: int | None) -> None:
    """`data` is an .exits file, an .ending file, or a .stacks file beside a good .ending file."""
    files = {"a.ucring": room.seed("rings", 1), "b.ucring": room.seed("rings", 2)}
    if data.startswith(b"{"):
        files["a.exits" if b'"ranks"' in data else "a.ending"] = data
    else:
        files |= {"a.ending": room.seed("endings", 0), "a.stacks": data}
    _analyzed(room, room.folder("endings", files), True, one)


def traces(room: Room, data: bytes, one: int | None) -> None:
    """`data` is a trace, or annotations of graphs."""
    from unicomm.profiler import TraceError, annotate, merge, read_events, report
    from unicomm.profiler.figures import to_json

    folder = room.folder("traces", {"trace0.json": data, "notes.json": room.seed("traces", 5)})
    mine, good = folder / "trace0.json", room.good / "trace1.json"
    merged, packets, page = (room.path / f"merged.{end}" for end in ("json", "pftrace", "html"))
    codes, limit = (0, 2), ("--memory", MEMORY_GIB)

    def merge_json() -> None:
        if not check("profile", "merge", mine, good, "-o", merged, *limit, codes=codes):
            json.loads(merged.read_bytes())

    memory = int(MEMORY_GIB * (1 << 30))

    def by(run: Callable[[], object]) -> Callable[[], object]:
        def refused() -> None:
            with contextlib.suppress(TraceError):
                run()

        return refused

    often = [
        by(lambda: read_events(mine, memory=memory)),
        by(lambda: merge([mine, good], merged, memory=memory)),
        by(lambda: merge([mine], packets, memory=memory)),
        by(lambda: strict_json(to_json(report([mine, good], memory=memory)))),
        by(lambda: annotate(mine, folder / "notes.json", merged, memory=memory)),
        by(lambda: annotate(good, mine, merged, memory=memory)),
    ]
    seldom: list[Callable[[], object]] = [
        merge_json,
        lambda: check("profile", "merge", mine, good, "-o", packets, *limit, codes=codes),
        lambda: check("profile", "report", mine, good, "--json", *limit, codes=codes, data=True),
        lambda: check("profile", "report", mine, *limit, codes=codes),
        lambda: check("profile", "report", mine, "--html", page, *limit, codes=codes),
        lambda: check("profile", "annotate", mine, folder / "notes.json", "-o", merged, *limit, codes=codes),
        lambda: check("profile", "annotate", good, mine, "-o", merged, *limit, codes=codes),
    ]
    _chosen(one, often, seldom)
    _check_page(page)


# --- messages -------------------------------------------------------------------------------------------


def hub(room: Room, data: bytes, one: int | None) -> None:
    """Requests to a hub and its answers, the note of a hub, and the answer of a collector of metrics."""
    from rich.console import Console

    from unicomm.flight_recorder.live.top import draw
    from unicomm.flight_recorder.metrics.otlp import CollectorError, read_answer
    from unicomm.launch.hub import protocol, server, view
    from unicomm.launch.run.job_folder import running_hubs

    folder = room.folder("hub", {"a.ucring": room.seed("rings", 1)})
    with contextlib.suppress(protocol.HubError):
        request = protocol.read_request(data)
        of = server.Hub(lambda message: None)
        try:
            folders = str(folder), str(room.path / "frozen"), str(room.path / "job")
            of.attempt(0, *folders, host=0, hosts=1, round="a round")
            assert of._start is not None
            if not isinstance(request, protocol.Gather | protocol.Announce | protocol.Tell):
                of._work(b"", request, of._start)
                protocol.read_answer(protocol.encode(of._answers.get()[1]), "a hub")
            of._note(request) if isinstance(request, protocol.Announce) else None
        finally:
            of._pool.shutdown()
            of._context.destroy(linger=0)
            os.close(of._wake_read), os.close(of._wake_write)
    with contextlib.suppress(protocol.HubError):
        answer = protocol.read_answer(data, "a hub")
        if isinstance(answer, protocol.Rings):
            seen = view.snapshot_of(answer, "a hub", everything=True)
            strict_json(json.dumps(seen.as_data()))
            console = Console(file=io.StringIO(), width=120)
            console.print(draw(seen, "a hub", 120))
            check_text(console.file.getvalue())  # type: ignore[attr-defined]
    with contextlib.suppress(CollectorError):
        read_answer(data, "http://collector")
    folder = room.folder("none", {"hub-1.json": data})
    os.chmod(folder, 0o700)
    list(running_hubs())
    with contextlib.suppress(protocol.HubError, UnicodeDecodeError):
        view.parse(data.decode())


def peers(room: Room, data: bytes, one: int | None) -> None:
    """What ranks tell each other beside the library's connections, and what they find in the store."""
    from unicomm.backends.out_of_band.wire import Inbox
    from unicomm.comms.errors import CommError
    from unicomm.comms.failures.faults import Fault, error_of
    from unicomm.comms.membership import rendezvous_parts as parts

    with contextlib.suppress(ValueError):
        for message in Inbox().feed(data):
            if isinstance(message, Fault):
                assert isinstance(error_of(message), CommError)
    with contextlib.suppress(ValueError):
        failure = parts.read_failure(data, 3)
        assert isinstance(parts.error_of(failure, "arrive", "c", 0, [0, 1, 2]), CommError)
    with contextlib.suppress(ValueError):
        assert parts.pack(parts.unpack(data, 3)) == data
    with contextlib.suppress(ValueError):
        assert len(parts.grow(data, 10_000)) <= 10_000


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    `run` takes a room, an input, and the number of the command that reads it; None: all. `modules` are those
    whose coverage guides the fuzzer; they are imported together with what they import.
    """

    run: Callable[[Room, bytes, int | None], None]
    mutate: mutations.Mutation
    modules: tuple[str, ...] = ()

    def __call__(self, room: Room, data: bytes, every: bool = False) -> None:
        """Raises for a broken promise. `every`: reads the input by all commands, else by one of them."""
        self.run(room, data, None if every else zlib.crc32(data))


_PROFILER = (
    *("annotations", "figures", "figures_html", "figures_text", "merged_json"),
    "merged_perfetto",
    "merging",
)
_READERS = (
    *(
        "unicomm.launch.cli",
        "unicomm.launch.commands.trace_actions",
        "unicomm.launch.exporter.followed_rings",
    ),
    *(f"unicomm.profiler.{name}" for name in _PROFILER),
    *(
        "unicomm.flight_recorder." + name
        for name in ("analysis.diff", "formats.pickles", "live.top", "metrics.otlp")
    ),
    *(
        "unicomm.flight_recorder." + name
        for name in ("metrics.openmetrics", "reports.report_html", "reports.perfetto")
    ),
    *("unicomm.flight_recorder." + name for name in ("reports.diff_text", "reports.rings_text")),
)
_MESSAGES = ("unicomm.launch.hub.server", "unicomm.launch.hub.view", "unicomm.flight_recorder.metrics.otlp")
_PEERS = ("unicomm.backends.out_of_band.wire", "unicomm.comms.membership.rendezvous_parts")
TARGETS: dict[str, Target] = {
    "rings": Target(rings, mutations.mutate_ring, _READERS),
    "dumps": Target(dumps, mutations.mutate_json, _READERS),
    "pickles": Target(pickles, mutations.mutate_pickle, _READERS),
    "archives": Target(archives, mutations.mutate_archive, _READERS),
    "endings": Target(endings, mutations.mutate_ending, _READERS),
    "traces": Target(traces, mutations.mutate_trace, ("unicomm.launch.cli", *_READERS)),
    "hub": Target(hub, mutations.mutate_message, _MESSAGES),
    "peers": Target(peers, mutations.mutate_message, _PEERS),
}


def signature(error: BaseException) -> str:
    """Returns what tells broken promises apart: the type of the exception, and the place in unicomm."""
    place, at = "", error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if "/unicomm/" in file:
            place = f"{file.rsplit('/unicomm/', 1)[1]}:{at.tb_frame.f_code.co_name}"
        at = at.tb_next
    what = str(error)[:60] if isinstance(error, BrokenPromiseError) else ""
    return f"{type(error).__name__} {what} in {place or 'the output'}"
