"""The call paths of records: which frames are kept, whose they are, and what bounds their number."""

import asyncio
import json
import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.flight_recorder.rings import ALL_REDUCE, META
from unicomm import _core
from unicomm.flight_recorder.formats.torch_dump import to_dict
from unicomm.flight_recorder.recording import writer
from unicomm.flight_recorder.ring.call_path import (
    TORCH_WRAPPERS,
    WRAPPERS,
    Whose,
    frame_in,
    user_frame,
    whose_of,
)
from unicomm.flight_recorder.ring.reader import FRAME, MOST_PATH_FRAMES, Ring, read_ring
from unicomm.flight_recorder.table.load import load
from unicomm.launch.cli import app

assert writer  # sets the folders of libraries
PACKAGES = "/opt/python/site-packages/"
TORCH = str(Path(torch.__file__).parent)
HERE = __file__


class Recording:
    """A ring, and a function that makes a record."""

    def __init__(self, path="", records=64):
        self.recorder = _core.Recorder(str(path), META, 0, 2, records)
        self.comm = self.recorder.add_comm("main", "shm", "u1", "0-1", 0, 2)
        self.seq = 0

    def __call__(self, *_):
        self.seq += 1
        self.recorder.finish(self.recorder.begin(self.comm, ALL_REDUCE, self.seq, self.seq, (), ()))

    def ring(self) -> Ring:
        return read_ring(self.recorder.snapshot())

    def paths(self):
        ring = self.ring()
        return [ring.call_path(record) for record in ring.records]

    def path(self):
        return self.paths()[-1]


@pytest.fixture
def record():
    return Recording()


def in_thread(work, *given):
    """Runs `work` in a thread, so that its paths begin with it and not with pytest's frames."""
    errors = []

    def guarded():
        try:
            work(*given)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def functions(path):
    """The functions of a path up to the thread's own, and without Recording's."""
    names = [f.function.rsplit(".", 1)[-1] for f in path]
    assert names[0] == "__call__"
    return names[1 : names.index("guarded")]


def code_in(file, text, **names):
    """What `text`, compiled as the content of `file`, defines."""
    exec(compile(text, file, "exec"), names)
    return names


def calling(file, inner, name="call"):
    """A function of `file` that calls `inner`."""
    return code_in(file, f"def {name}(*_):\n return inner()", inner=inner)[name]


def test_the_path_has_each_callers_line(record):
    def inner():
        record()

    def middle():
        inner()

    def outer():
        middle()

    in_thread(outer)
    path = record.path()
    assert functions(path) == ["inner", "middle", "outer"]
    assert {f.file for f in path} == {HERE}
    first = inner.__code__.co_firstlineno
    assert [f.line for f in path[1:4]] == [first + 1, first + 4, first + 7]
    assert user_frame(path) is path[0]


def test_each_path_is_written_once(record):
    def inner():
        record()

    def outer():
        for _ in range(50):
            inner()
            inner()

    in_thread(outer)
    paths = record.paths()
    assert len(paths) == 64
    assert len({p[2].line for p in paths}) == 2
    # Two paths that differ in the caller's line: the callers are shared, the rest is there twice.
    assert len(record.ring().frames) == len(paths[0]) + 3


def test_wrappers_are_not_the_users_line(record):
    for package, name in WRAPPERS.items():
        file = PACKAGES + package + "x.py"
        hook = calling(file, record, "hook")
        work = calling("/job/train.py", calling(file, calling(file, hook, "middle"), "entry"), "step")
        in_thread(work)
        path = record.path()
        own = [f for f in path if f.file == file]
        # Of three calls in a row, what the wrapper does and what the user called.
        assert [(f.function, f.library) for f in own] == [("hook", name), ("entry", name)], package
        assert all(f.whose is Whose.WRAPPER for f in own)


def test_the_users_line_comes_first_through_nested_wrappers(record):
    """A training loop in Lightning, which calls the user's step, which calls a model in DDP."""
    begin, comm = record.recorder.begin, record.comm
    issue = code_in(
        f"{TORCH}/distributed/distributed_c10d.py",
        "def all_reduce():\n begin(comm, 4, 1, 1, (), ())",
        begin=begin,
        comm=comm,
    )["all_reduce"]
    sync = calling(f"{TORCH}/nn/parallel/distributed.py", issue, "_sync_buffers")
    decorated = calling(f"{TORCH}/nn/parallel/distributed.py", sync, "wrapper")
    module = calling(f"{TORCH}/nn/modules/module.py", decorated, "_call_impl")
    step = calling("/job/model.py", module, "training_step")
    loop = calling(f"{PACKAGES}lightning/loops/fit.py", step, "advance")
    fit = calling(f"{PACKAGES}lightning/trainer.py", loop, "fit")
    in_thread(calling("/job/train.py", fit, "main"))
    path = record.path()
    assert [(f.function, f.library) for f in path[:5]] == [
        ("_sync_buffers", "DDP"),
        ("training_step", ""),
        ("advance", "Lightning"),
        ("fit", "Lightning"),
        ("main", ""),
    ]
    assert str(user_frame(path)) == "/job/model.py:2"
    assert str(record.ring().frame(record.ring().records[-1])) == "/job/model.py:2"


def test_torchs_line_is_kept_where_there_is_no_other(record):
    begin, comm = record.recorder.begin, record.comm
    names = {"begin": begin, "comm": comm}
    work = code_in(f"{TORCH}/autograd/x.py", "def hook():\n begin(comm, 4, 1, 1, (), ())", **names)["hook"]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [(f.function, f.whose, f.library) for f in record.path()] == [("hook", Whose.TORCH, "torch")]


def test_threads_keep_their_own_paths(record):
    barrier = threading.Barrier(4)

    def work(number):
        call = calling(f"/job/thread{number}.py", record)
        barrier.wait()
        for _ in range(4):
            call()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sorted(next(f.file for f in path if f.file.startswith("/job")) for path in record.paths())
    assert found == sorted(f"/job/thread{i}.py" for i in range(4) for _ in range(4))
    assert not any("threading" in f.file for path in record.paths() for f in path)


def test_generators_and_coroutines(record):
    def numbers():
        record()
        yield 1
        yield from more()

    def more():
        record()
        yield 2

    def consume():
        list(numbers())

    async def leaf():
        await asyncio.sleep(0)
        record()

    async def branch():
        await leaf()

    def run():
        asyncio.run(branch())

    in_thread(consume)
    assert functions(record.paths()[0]) == ["numbers", "consume"]
    assert functions(record.paths()[1]) == ["more", "numbers", "consume"]
    in_thread(run)
    assert functions(record.path()) == ["leaf", "branch", "run"]


def test_a_deep_recursion_has_few_paths(record):
    def descend(depth, mask):
        if depth == 0:
            record()
        elif mask & 1:
            descend(depth - 1, mask >> 1)
        else:
            descend(depth - 1, mask >> 1)

    for mask in range(0, 1 << 12, 37):
        in_thread(descend, 400, mask * 0x9E3779B9)
        in_thread(descend, 12, mask)
    ring = record.ring()
    assert len(ring.frames) < 100
    assert int(ring.header["frames_dropped"]) == 0
    assert all(len(path) <= MOST_PATH_FRAMES for path in record.paths())
    # Of the deep stacks only the innermost calls are seen, of the others the recursion's caller, too.
    names = {tuple(f.function.rsplit(".", 1)[-1] for f in path) for path in record.paths()}
    assert names == {("__call__", "descend", "descend"), ("__call__", "descend", "descend", "guarded")}


def test_a_path_has_at_most_sixteen_frames(record):
    call = record
    for level in range(40):
        call = calling(f"/job/level{level}.py", call)
    in_thread(call)
    files = [f.file for f in record.path()]
    assert files == [HERE, *(f"/job/level{i}.py" for i in range(MOST_PATH_FRAMES - 1))]


def test_a_full_table_keeps_the_users_line_first_and_then_nothing():
    record = Recording(records=8192)
    ring = record.ring()
    capacity = int(ring.header["frame_cap"])
    begin, comm = record.recorder.begin, record.comm
    work = code_in(
        "/job/generated.py",
        "def work():\n" + " begin(comm, 4, 1, 1, (), ())\n" * (capacity + 500),
        begin=begin,
        comm=comm,
    )["work"]
    in_thread(work)
    ring = record.ring()
    paths = record.paths()
    lengths = [len(p) for p in paths]
    assert lengths[0] == 2
    assert lengths == sorted(lengths, reverse=True)  # whole paths, then single lines, then none
    assert lengths.count(1) == 512
    assert lengths.count(0) > 0
    assert all(p[0].line == i + 2 for i, p in enumerate(paths) if p)
    assert len(ring.frames) == capacity
    assert int(ring.header["frames_dropped"]) == lengths.count(1) + lengths.count(0)
    assert ring.frame(ring.records[-1]) is None
    in_thread(lambda: record.recorder.begin(comm, ALL_REDUCE, 1, 1, (), ()))  # a new path: no harm


def test_code_that_is_compiled_again_and_again(record):
    """Codes end and their addresses are used again, each time for another function."""
    begin, comm = record.recorder.begin, record.comm
    for turn in range(6000):
        name = f"f{turn % 3}"
        text = f"def {name}():\n begin(comm, 4, 1, 1, (), ())"
        code_in("<string>", text, begin=begin, comm=comm)[name]()
        if turn % 50 == 0:
            assert record.path()[0].function == name
    assert len({f.function for f in record.ring().frames if f.file == "<string>"}) == 3
    assert len(record.ring().frames) < 60


def test_code_without_a_file(record):
    in_thread(calling("", record))
    path = record.path()
    assert [f.file for f in path[:2]] == [HERE, ""]
    assert path[1].function == "call"


def test_a_name_that_is_no_utf8(record):
    in_thread(calling("/job/\udcff.py", record))
    assert record.path()[1].file == "?"


def test_generated_code_is_not_the_users(record):
    begin, comm = record.recorder.begin, record.comm
    text = "def forward():\n begin(comm, 4, 1, 1, (), ())"
    inner = code_in("<eval_with_key>.3", text, begin=begin, comm=comm)["forward"]
    in_thread(calling("/job/train.py", inner))
    assert record.path()[0].file == "/job/train.py"


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        ("/job/train.py", Whose.USER),
        ("/job/lightning/train.py", Whose.USER),
        ("/job/accelerate/train.py", Whose.USER),
        ("<string>", Whose.USER),
        ("", Whose.USER),
        ("/v/lib/python3.11/site-packages/mine/train.py", Whose.USER),
        ("/v/lib/python3.11/site-packages/accelerate/accelerator.py", Whose.WRAPPER),
        ("/usr/lib/python3/dist-packages/deepspeed/runtime/engine.py", Whose.WRAPPER),
        ("/v/lib/python3.11/site-packages/transformers/trainer.py", Whose.WRAPPER),
        ("/v/lib/python3.11/site-packages/transformers/models/x.py", Whose.USER),
        ("/v/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", Whose.WRAPPER),
        ("/v/lib/python3.11/site-packages/torch/nn/modules/module.py", Whose.TORCH),
        ("/v/lib/python3.11/threading.py", Whose.HIDDEN),
        ("/v/lib/python3.11/site-packages/unicomm/comms/work.py", Whose.HIDDEN),
        ("<frozen runpy>", Whose.HIDDEN),
        ("/tmp/torchinductor_me/ab/cab.py", Whose.TORCH),
    ],
)
def test_whose_a_file_of_a_dump_is(file, whose):
    assert whose_of(file) is whose


def test_the_core_and_the_reader_of_dumps_agree(record):
    """The core knows folders, the reader only names; on installed files both say the same."""
    files = ["/job/train.py", "/job/lightning/train.py", PACKAGES + "mine/train.py"]
    files += [PACKAGES + package + "x.py" for package in WRAPPERS]
    files += [f"{TORCH}/{folder}x.py" for folder in (*TORCH_WRAPPERS, "autograd/")]
    begin, comm = record.recorder.begin, record.comm
    for file in files:
        text = "def work():\n begin(comm, 4, 1, 1, (), ())"
        work = code_in(file, text, begin=begin, comm=comm)["work"]
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert record.path() == (frame_in(file, "work", 2),)


def test_rings_of_version_1_have_single_frames(record):
    in_thread(record)
    data = bytearray(record.recorder.snapshot())
    head = read_ring(bytes(data)).header
    data[8] = 1
    for index in range(int(head["frame_count"])):
        at = int(head["frame_off"]) + index * FRAME.itemsize + FRAME.fields["caller"][1]
        data[at : at + 8] = bytes(8)
    old = read_ring(bytes(data))
    assert [len(old.call_path(r)) for r in old.records] == [1]
    assert old.frame(old.records[0]).function.endswith("__call__")


def test_callers_in_a_circle_end(record):
    in_thread(record)
    data = bytearray(record.recorder.snapshot())
    head = read_ring(bytes(data)).header
    for index in range(int(head["frame_count"])):
        at = int(head["frame_off"]) + index * FRAME.itemsize + FRAME.fields["caller"][1]
        data[at : at + 4] = (1).to_bytes(4, "little")
    damaged = read_ring(bytes(data))
    assert len(damaged.call_path(damaged.records[0])) == MOST_PATH_FRAMES


@pytest.fixture
def folder(tmp_path):
    """Rings of two ranks that called different operations through DDP."""
    for rank, op in ((0, ALL_REDUCE), (1, 3)):
        recorder = _core.Recorder(str(tmp_path / f"rank{rank}.ucring"), META, rank, 2, 64)
        comm = recorder.add_comm("main", "shm", "u1", "0-1", rank, 2)
        text = "def sync():\n begin(comm, op, 1, 1, (), ())"
        names = {"begin": recorder.begin, "comm": comm, "op": op}
        sync = code_in(f"{TORCH}/nn/parallel/distributed.py", text, **names)["sync"]
        work = calling(f"/job/step{rank}.py", sync, "step")
        thread = threading.Thread(target=calling("/job/train.py", work, "main"))
        thread.start()
        thread.join()
    return tmp_path


def test_dumps_have_all_frames(folder):
    ring = read_ring(folder / "rank0.ucring")
    entry = to_dict(ring)["entries"][0]
    assert [(f["name"], f["line"]) for f in entry["frames"]] == [("sync", 2), ("step", 2), ("main", 2)]
    assert entry["unicomm_user_frame"] == 1
    rows = load([folder])
    (folder / "dumps").mkdir()
    for rank in (0, 1):
        dump = to_dict(read_ring(folder / f"rank{rank}.ucring"))
        (folder / "dumps" / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    again = load([folder / "dumps"])
    assert [again.stack(row) for row in (0, 1)] == [rows.stack(row) for row in (0, 1)]
    assert str(user_frame(again.stack(1))) == "/job/step1.py:2"


def output(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code in (0, 1), done.output
    return done.stdout


def test_show_prints_paths_on_demand(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plain = output("trace", "show", folder)
    assert "step0.py:2" in plain
    assert "train.py:2" not in plain
    assert "DDP" not in plain
    text = output("trace", "show", folder, "--paths")
    places = ["step0.py:2 step", "> distributed.py:2 sync (DDP)", "< train.py:2 main"]
    assert [text.index(place) for place in places] == sorted(text.index(place) for place in places)
    raw = output("trace", "show", folder, "--raw", "--paths")
    assert "> distributed.py:2 sync (DDP)" in raw
    data = json.loads(output("trace", "show", folder, "--json"))
    assert len(data["processes"][0]["trace"]["entries"][0]["frames"]) == 3


def test_analyze_names_the_users_line_and_prints_paths_on_demand(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plain = output("trace", "analyze", folder)
    assert "/job/step1.py:2" in plain
    assert "rank 1  /job/train.py:2 in main\n" in re.sub(r" +\n", "\n", plain)
    assert f"{TORCH}/nn" not in plain
    text = output("trace", "analyze", folder, "--verbose")
    assert "call path of rank 1" in text
    assert "/job/train.py:2" in text
    assert "DDP" in text
    marked = output("trace", "analyze", folder, "--verbose", "--markdown")
    assert f"1. `{TORCH}/nn/parallel/distributed.py:2` sync (DDP)" in marked
    brief = output("trace", "analyze", folder, "--markdown")
    assert "- rank 1: `/job/train.py:2 in main`" in brief
    assert "Call path" not in brief
    found = json.loads(output("trace", "analyze", folder, "--json"))
    by_rank = {tuple(p["ranks"]): p["path"] for p in found["call_paths"]}
    assert [(line["file"], line["library"]) for line in by_rank[(1,)]][1:] == [
        ("/job/step1.py", ""),
        ("/job/train.py", ""),
    ]
    assert by_rank[(0,)][0]["library"] == "DDP"
    shared = output("trace", "analyze", folder, "--json", "--share")
    assert "/job/" not in shared
    assert '"step1.py"' in shared
