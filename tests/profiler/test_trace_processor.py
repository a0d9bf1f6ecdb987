"""SQL queries on merged traces in Perfetto's own trace processor, if there is one.

Nothing is downloaded. The trace processor is the one that PERFETTO_TRACE_PROCESSOR names, else the one that
the `perfetto` package has downloaded earlier, else trace_processor_shell in PATH.
"""

import os
import shutil
from pathlib import Path

import pytest

from benchmarks import profile_merge as generator
from unicomm.profiler import merge

NAMED = "PERFETTO_TRACE_PROCESSOR"
CACHE = Path("~/.local/share/perfetto/prebuilts").expanduser()


def shell():
    """Returns the path of the trace processor, or None."""
    if named := os.environ.get(NAMED):
        assert Path(named).is_file(), f"{NAMED}={named} is no file"
        return named
    cached = sorted(CACHE.glob("trace_processor_shell-*"), key=lambda p: p.stat().st_mtime)
    return str(cached[-1]) if cached else shutil.which("trace_processor_shell")


@pytest.fixture(scope="module", params=["json", "pftrace"])
def query(request, tmp_path_factory):
    """Runs SQL on the merged traces of 4 ranks with 80 collectives; rank 2 is 3 ms late once."""
    found = shell()
    if found is None:
        pytest.skip(f"no trace_processor_shell of Perfetto: name one in {NAMED}")
    api = pytest.importorskip("perfetto.trace_processor")
    folder = tmp_path_factory.mktemp("sql")
    output = folder / f"m.{request.param}"
    merge(generator.generate(folder, 4, 400, 0.2, late=2), output)
    config = api.TraceProcessorConfig(bin_path=found, unique_port=True)
    with api.TraceProcessor(trace=str(output), config=config) as processor:
        yield lambda sql: [tuple(vars(row).values()) for row in processor.query(sql)]


# A slice with the process that it belongs to: in JSON by its thread, else by its track.
SLICES = """
    (select slice.*, coalesce(process_track.upid, thread.upid) as upid from slice
     left join process_track on slice.track_id = process_track.id
     left join thread_track on slice.track_id = thread_track.id
     left join thread on thread_track.utid = thread.utid)
"""


def arg(of, name):
    """An argument of a slice: 'debug' in Perfetto's own format, 'args' in JSON."""
    return (
        f"coalesce(extract_arg({of}.arg_set_id, 'debug.{name}'), extract_arg({of}.arg_set_id, 'args.{name}'))"
    )


def test_nothing_was_lost_on_the_way_in(query):
    assert query("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []


def test_a_process_a_rank(query):
    rows = query("select name from process where name like 'rank %' order by name")
    assert rows == [(f"rank {r} (host0)",) for r in range(4)]


def test_each_collective_has_a_flow_through_all_ranks(query):
    """80 collectives of 4 ranks: three arrows each, between processes, and the same sequence number."""
    flows = f"from flow join {SLICES} a on slice_out = a.id join {SLICES} b on slice_in = b.id"
    same = f"{arg('a', 'seq_num')} = {arg('b', 'seq_num')}"
    assert query(f"select count(*) {flows}") == [(240,)]
    assert query(f"select count(*) {flows} where a.upid != b.upid and {same}") == [(240,)]
    assert query(f"select count(*) {flows} where a.name = 'unicomm::all_reduce' and b.name = a.name") == [
        (240,)
    ]


def test_waiting_is_apart_from_transfer(query):
    ((longest,),) = query("select max(dur) from slice where name = 'waiting'")
    assert longest == pytest.approx(3_000_000, rel=0.01)
    # Both stand inside the operation, which they fill.
    inside = """from slice part join slice whole on part.parent_id = whole.id
                where part.name in ('waiting', 'transfer') and whole.name = 'unicomm::all_reduce'"""
    ((filled,),) = query(f"select sum(part.dur) {inside}")
    ((all_of_it,),) = query(f"select sum(dur) from slice where id in (select whole.id {inside})")
    assert filled == pytest.approx(all_of_it, abs=1000)


def test_the_late_rank_by_sql(query):
    """Finds the rank that came last to the collective with the longest waiting."""
    longest = f"""select {arg("whole", "seq_num")} as seq, {arg("whole", "comm_uid")} as uid
                  from slice part join slice whole on part.parent_id = whole.id
                  where part.name = 'waiting' order by part.dur desc limit 1"""
    latest = f"""with worst as ({longest})
                 select process.name from {SLICES} s join worst join process using (upid)
                 where s.name = 'unicomm::all_reduce' and {arg("s", "seq_num")} = worst.seq
                     and {arg("s", "comm_uid")} = worst.uid
                 order by s.ts desc limit 1"""
    assert query(latest) == [("rank 2 (host0)",)]
