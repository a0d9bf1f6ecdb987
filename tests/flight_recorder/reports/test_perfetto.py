"""The Perfetto trace, decoded with the package's own messages (its query engine is not in it)."""

import builtins
import importlib
import re
import sys
from collections import defaultdict

import numpy as np
import pytest
import torch

from tests.flight_recorder.reports.test_html import missing_rank, table_of
from tests.flight_recorder.rings import ALL_REDUCE, RECV, SEND
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.corpus.nccl_dump import nccl_table
from unicomm.flight_recorder.corpus.simulated_job import Action, SimulatedJob
from unicomm.flight_recorder.table.tracks import side_by_side

perfetto = pytest.importorskip(
    "unicomm.flight_recorder.reports.perfetto", reason="needs the package perfetto"
)
protos = importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

ONE = [torch.ones(8)]


class Decoded:
    """What a viewer makes of a trace: tracks with their slices."""

    def __init__(self, path):
        trace = protos.Trace()
        trace.ParseFromString(path.read_bytes())
        self.tracks, self.slices, self.instants = {}, [], []
        names, arguments, open_ = {}, {}, {}
        for packet in trace.packet:
            assert packet.trusted_packet_sequence_id == 1
            names |= {n.iid: n.name for n in packet.interned_data.event_names}
            arguments |= {n.iid: n.name for n in packet.interned_data.debug_annotation_names}
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                assert track.uuid not in self.tracks
                assert not track.parent_uuid or track.parent_uuid in self.tracks
                self.tracks[track.uuid] = track
            if not packet.HasField("track_event"):
                continue
            event = packet.track_event
            assert event.track_uuid in self.tracks
            if event.type == event.TYPE_SLICE_BEGIN:
                values = {
                    arguments[a.name_iid]: a.int_value if a.HasField("int_value") else a.string_value
                    for a in event.debug_annotations
                }
                new = {"name": names[event.name_iid], "track": event.track_uuid, "begin": packet.timestamp}
                new |= {"end": None, "flows": list(event.flow_ids), **values}
                assert event.track_uuid not in open_, "slices of one track overlap"
                open_[event.track_uuid] = new
                self.slices.append(new)
            elif event.type == event.TYPE_SLICE_END:
                ended = open_.pop(event.track_uuid)
                assert packet.timestamp >= ended["begin"]
                ended["end"] = packet.timestamp
            else:
                self.instants.append((event.name, packet.timestamp))

    def of(self, rank):
        """Slices of a rank."""
        return [s for s in self.slices if self.process(s["track"]).process.pid == rank + 1]

    def process(self, track):
        return self.tracks[self.tracks[track].parent_uuid]


def write(table, tmp_path, stuck_after=0):
    report = analyze(table, stuck_after=stuck_after)
    return report, Decoded(perfetto.write(report, table, tmp_path / "a.pftrace"))


def test_a_missing_rank(tmp_path):
    report, trace = write(missing_rank(4, guilty=2), tmp_path)
    names = [t.process.process_name for t in trace.tracks.values() if t.HasField("process")]
    assert names == ["rank 0", "rank 1", "rank 2 (culprit)", "rank 3"]
    assert [len(trace.of(rank)) for rank in range(4)] == [5, 5, 4, 5]
    first, last = trace.of(0)[0], trace.of(0)[-1]
    assert (first["name"], first["group"], first["seq"], first["elements"]) == ("all_reduce", "main", 1, 8)
    assert first["arguments"] == "all_reduce float32[8] SUM"
    assert first["state"] == "completed"
    assert first["end"] is not None
    assert first["called from"].startswith("test_html.py:")
    assert (last["state"], last["end"]) == ("started", None)
    assert trace.instants[0][0] == report.main.sentence
    assert {trace.tracks[s["track"]].name for s in trace.slices} == {"main"}


def test_flows_join_the_ranks_of_a_collective(tmp_path):
    _, trace = write(missing_rank(3, guilty=-1), tmp_path)
    flows = [[s["flows"] for s in trace.of(rank)] for rank in range(3)]
    assert flows[0] == flows[1] == flows[2]
    assert len({f for [f] in flows[0]}) == 5


def test_flows_join_a_send_and_its_receive(tmp_path):
    def program(recorder, rank):
        comm = recorder.add_comm("main", "shm", "u", "0,1", rank, 2)
        for seq in (1, 2):
            if rank == 0:
                recorder.finish(recorder.begin(comm, SEND, seq, 1, ONE, [], peer=1, flags=2))
            else:
                recorder.finish(recorder.begin(comm, RECV, seq, 1, [], ONE, peer=0, flags=2 | 8))
        # The other direction counts apart.
        record = recorder.begin(
            comm, RECV if rank == 0 else SEND, 1, 1, ONE, [], peer=1 - rank, flags=10 - 8 * rank
        )
        recorder.finish(record)

    _, trace = write(table_of(program, 2), tmp_path)
    sends, receives = ([s["flows"][0] for s in trace.of(r)] for r in (0, 1))
    assert sends[:2] == receives[:2]
    assert sends[2] == receives[2]
    assert len(set(sends)) == 3
    assert [s["peer"] for s in trace.of(0)] == [1, 1, 1]


def test_flows_join_messages_of_dumps_that_number_those_of_all_pairs_together(tmp_path):
    job = SimulatedJob(3, [[], [], []])
    job.programs[0] = [Action("send", peer=peer, line=line) for line, peer in enumerate((1, 2, 1, 1))]
    job.programs[1] = [Action("recv", peer=0, line=line) for line in (10, 12, 13)]
    job.programs[2] = [Action("recv", peer=0, line=11), Action("barrier", group="alone", line=20)]
    job.groups = {"alone": [2], **job.groups}
    table = nccl_table(job.run())
    assert not any(source.exact_p2p for source in table.sources)
    _, trace = write(table, tmp_path)
    lines = defaultdict(list)
    for one in trace.slices:
        [flow] = one["flows"]
        lines[flow].append(int(re.search(r"train\.py:(\d+) ", one["called from"])[1]))
    assert sorted(lines.values()) == [[0, 10], [1, 11], [2, 12], [3, 13], [20]]


def test_queued_operations_get_tracks_beside_each_other(tmp_path):
    def program(recorder, rank):
        comm = recorder.add_comm("main", "shm", "u", "0,1", rank, 2)
        records = [recorder.begin(comm, ALL_REDUCE, s, s, ONE, ONE, 1, flags=1) for s in (1, 2, 3)]
        for record in records:
            recorder.finish(record)
        recorder.finish(recorder.begin(comm, ALL_REDUCE, 4, 4, ONE, ONE, 1))

    _, trace = write(table_of(program, 2), tmp_path)  # `Decoded` checks that no two overlap on a track
    tracks = {trace.tracks[s["track"]].name for s in trace.of(0)}
    assert "main" in tracks
    assert len(tracks) == 3
    assert trace.tracks[trace.of(0)[3]["track"]].name == "main"


def test_slices_side_by_side():
    begin, end = np.array([0, 1, 5, 6, 20]), np.array([4, 9, 6, 8, 30])
    assert side_by_side(begin, end).tolist() == [0, 1, 0, 0, 0]
    end[0] = 1 << 62
    assert side_by_side(begin, end).tolist() == [0, 1, 2, 2, 1]


def test_the_newest_operations_where_there_are_too_many(monkeypatch, tmp_path):
    monkeypatch.setattr(perfetto, "MOST_SLICES", 1)
    table = missing_rank(2, guilty=-1, operations=150)
    _, trace = write(table, tmp_path)
    assert [s["seq"] for s in trace.of(0)] == list(range(51, 151))


def test_without_the_package(monkeypatch):
    real = builtins.__import__

    def refuse(name, *more, **options):
        if name.startswith("perfetto."):
            raise ModuleNotFoundError("No module named 'perfetto'", name="perfetto")
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for module in ("reports.perfetto", "formats.perfetto_packets"):
        monkeypatch.delitem(sys.modules, f"unicomm.flight_recorder.{module}")
    with pytest.raises(ImportError, match=r"pip install 'unicomm\[trace\]'"):
        importlib.import_module("unicomm.flight_recorder.reports.perfetto")


def test_a_damaged_clock_leads_to_no_time_before_1970(tmp_path):
    table = missing_rank(3, guilty=2)
    report = analyze(table, stuck_after=0)
    report.clock_offsets_ns.update(dict.fromkeys(range(3), 1 << 62))
    trace = Decoded(perfetto.write(report, table, tmp_path / "a.pftrace"))
    assert {one["begin"] for one in trace.slices} == {0}
    assert trace.instants == [(report.main.sentence, 0)]
