"""The HTML report: self-contained, escaped, with a bounded timeline of any number of ranks."""

import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.flight_recorder.rings import ALL_REDUCE, META, RECV, SEND
from unicomm import _core
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Cause, Edge, Finding, Verdict
from unicomm.flight_recorder.corpus.fault_kinds import Case, job_of, training
from unicomm.flight_recorder.corpus.simulated_job import Action, SimulatedJob
from unicomm.flight_recorder.reports import report_html as html
from unicomm.flight_recorder.reports import timeline, timeline_data
from unicomm.flight_recorder.reports.wait_graph_svg import draw
from unicomm.flight_recorder.ring.reader import InputRemark, read_ring
from unicomm.flight_recorder.table.builder import TableBuilder

ONE = [torch.ones(8)]
EVIL = """</script><script>alert(1)</script><img src=x onerror='alert(2)'>"&{{data}}{{body}}-->"""


def table_of(program, ranks, operations=64):
    """A table of the rings that `program(recorder, rank)` fills."""
    builder = TableBuilder()
    for rank in range(ranks):
        recorder = _core.Recorder("", META, rank, ranks, operations)
        program(recorder, rank)
        builder.add_ring(read_ring(recorder.snapshot()))
    return builder.finish()


def missing_rank(ranks, guilty, name="main", operations=5):
    """Rank `guilty` does not come to the last all-reduce."""

    def program(recorder, rank):
        comm = recorder.add_comm(name, "shm", "u", f"0-{ranks - 1}", rank, ranks)
        for seq in range(1, operations + 1):
            if seq < operations or rank != guilty:
                record = recorder.begin(comm, ALL_REDUCE, seq, seq, ONE, ONE, 1)
                if seq < operations:
                    recorder.finish(record)

    return table_of(program, ranks, max(64, operations))


def cycle(recorder, rank):
    tp, dp = (recorder.add_comm(name, "shm", name, "0,1", rank, 2) for name in ("tp", "dp"))
    recorder.begin(tp if rank else dp, ALL_REDUCE, 1, 1, ONE, ONE, 1)


def data_of(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(found.group(1))
    slices, kinds = data["slices"], data["kinds"]
    names = ("call", "group", "frame", "state", "marked", "peer")
    return data | {
        "begin": np.cumsum(slices["begin"]).tolist(),
        "seq": np.cumsum(slices["seq"]).tolist(),
        **{name: [kinds[k][i] for k in slices["kind"]] for i, name in enumerate(names)},
    }


class Elements(HTMLParser):
    """What a browser would make of the page: elements, their attributes, and the text of the document."""

    VOID = frozenset({"meta", "img", "br", "link", "input"})

    def __init__(self, page):
        super().__init__()
        self.found, self.open, self.text = [], [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data


def test_a_missing_rank(tmp_path):
    table = missing_rank(4, guilty=2)
    report = analyze(table, stuck_after=0)
    assert report.main.culprits == [2]
    path = html.write(report, table, tmp_path / "report.html")
    page = path.read_text()
    elements = Elements(page)
    assert report.main.sentence in elements.text
    for step in [*report.main.next_steps, *report.main.evidence]:
        assert step in elements.text
    data = data_of(page)
    assert [(r["rank"], r["tone"]) for r in data["ranks"]] == [
        (0, "warn"),
        (1, "warn"),
        (2, "bad"),
        (3, "warn"),
    ]
    assert [r["to"] - r["from"] for r in data["ranks"]] == [5, 5, 4, 5]
    assert data["ranks"][2]["absent"] == "not in all_reduce #5"
    assert data["ranks"][0]["absent"] == ""
    slices = data["slices"]
    assert {len(values) for values in slices.values()} == {19}
    stuck = [i for i, state in enumerate(data["state"]) if state != 3]
    assert [data["seq"][i] for i in stuck] == [5, 5, 5]
    assert [i for i, m in enumerate(data["marked"]) if m] == stuck
    assert data["calls"] == ["all_reduce float32[8] SUM"]
    assert data["places"][data["frame"][0]].startswith("test_html.py:")
    end = [b + d for b, d in zip(data["begin"], slices["last"], strict=True)]
    assert max(end) == pytest.approx(data["span"], abs=10)
    assert all(end[i] == pytest.approx(data["span"], abs=10) for i in stuck)


def test_nothing_comes_from_outside(tmp_path):
    table = missing_rank(4, guilty=1)
    page = html.page(analyze(table, stuck_after=0), table)
    assert "default-src 'none'" in page
    elements = Elements(page)
    for tag, attributes in elements.found:
        assert tag not in ("link", "iframe", "img", "object", "embed")
        assert not {"src", "href"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?://|url\(['\"]?[^#]|@import|fetch\(|XMLHttpRequest", page)


def test_texts_from_dumps_cannot_become_elements(tmp_path):
    table = missing_rank(4, guilty=1, name=EVIL)
    for i, stack in enumerate(table.stacks):
        table.stacks[i] = tuple(type(f)(EVIL, f"/tmp/{EVIL}.py", f.line) for f in stack)
    report = analyze(table, stuck_after=0)
    report.main.edges.append(Edge(0, [1], EVIL, EVIL, 1, EVIL))
    report.remarks.append(InputRemark(EVIL, EVIL))
    plain = missing_rank(4, guilty=1)
    plain_report = analyze(plain, stuck_after=0)
    plain_report.main.edges.append(Edge(0, [1], "g", "o", 1, "w"))
    plain_report.remarks.append(InputRemark("a.pickle", "broken"))
    report.stragglers = plain_report.stragglers = []  # how many are worth a line is up to chance
    ours, theirs = Elements(html.page(report, table)), Elements(html.page(plain_report, plain))
    assert [tag for tag, _ in ours.found] == [tag for tag, _ in theirs.found]
    assert EVIL in ours.text
    assert data_of(html.page(report, table))["groups"] == [EVIL]


def test_a_cycle_is_drawn_as_one():
    table = table_of(cycle, 2)
    report = analyze(table, stuck_after=0)
    assert report.main.verdict is Verdict.WAIT_CYCLE
    page = html.page(report, table)
    assert "The wait cycle" in Elements(page).text
    drawing = draw(report.main)  # for wide and for narrow pages
    assert drawing.count("<rect") == 2 * 2
    assert drawing.count('class="arrow"') == 2 * 2
    assert "all_reduce #1 of tp" in drawing
    assert "all_reduce #1 of dp" in drawing


def boxes(found, waiting=None):
    """The first line of each box of a drawing, and how many arrows it has."""
    drawing = draw(found, waiting).split('class="waits tall"')[0]
    return re.findall(r'class="name"[^>]*>([^<]*)<', drawing), drawing.count('class="arrow"')


def test_the_drawing_joins_those_who_wait_for_the_same():
    edges = [Edge(r, [9], "main", "all_reduce float32[8]", 4, "a/b.py:7") for r in (0, 1, 2)]
    edges.append(Edge(9, [10, 11], "pp", "recv", 1, "c.py:8"))
    found = Finding(Verdict.BLOCKED_OUTSIDE, [10, 11], [0, 1, 2, 9], "pp", 1, "recv", edges=edges)
    assert boxes(found) == (["ranks 0-2", "rank 9", "ranks 10-11, culprits"], 2)
    assert "b.py:7" in draw(found)
    many = [Edge(r, [r + 1000], "g", "send", r, "") for r in range(100)]
    assert draw(Finding(Verdict.UNMATCHED_P2P, edges=many)) == ""


def test_each_rank_stands_in_one_box_of_the_drawing():
    """Victims that wait in other operations are not in the box of the finding's operation."""
    edges = [Edge(2, [54], "dp", "reduce_scatter f[8]", 5, "b.py:7")]
    edges += [Edge(r, [r + 2], f"tp{r}", "all_reduce f[4]", 7, "b.py:9") for r in (0, 4, 8)]
    found = Finding(Verdict.PROCESS_STOPPED, [54])
    found.victims, found.group, found.seq_num, found.edges = list(range(54)), "dp", 5, edges
    # 6 and 10 wait in the operation of the finding, as 2 does; 0, 4 and 8 make one call in three groups.
    waiting = dict.fromkeys((2, 6, 10), ("reduce_scatter", "/job/b.py:7"))
    assert boxes(found, waiting) == (["ranks 2-10:4", "ranks 0-8:4", "rank 54, culprit"], 2)
    assert "all_reduce #7 of 3 communicators" in draw(found, waiting)
    # Without the ranks that wait, no rank is said to be where it may not be.
    names, _ = boxes(found)
    assert sorted(re.findall(r"\d+", " ".join(names))) == sorted(["2", "0", "4", "8", "6", "10", "54"])


def test_ranks_that_wait_at_other_lines_have_other_boxes():
    lines = [10, 11, 11, 10, 12]
    calls = [[Action("all_reduce", red="SUM", line=line)] * 3 for line in lines]
    job = SimulatedJob(5, calls, live=True)
    job.change(4, 2, op="leave")
    table = job.run().table()
    report = analyze(table)
    assert [edge.rank for edge in report.main.edges] == [0]  # it stands for the others
    drawing = html.page(report, table).split('class="waits wide"')[1].split("</svg>")[0]
    texts = re.findall(r"<text[^>]*>([^<]*)<", drawing)
    assert [texts[i : i + 3] for i in (0, 3)] == [
        ["ranks 0, 3", "all_reduce #3 of world", "train.py:10"],
        ["ranks 1-2", "all_reduce #3 of world", "train.py:11"],
    ]
    assert texts[6:] == ["rank 4, culprit", "waits for no rank"]


def test_the_page_says_how_many_culprits_of_many_ranks_it_draws():
    job = job_of(128, training(5))
    job.live = True
    for rank in range(60):
        job.replace_call(rank, len(job.programs[rank]) - 2, Action("leave"))
    table = job.run().table()
    report = analyze(table)
    assert report.main.culprits == list(range(60))
    page = html.page(report, table)
    drawn = sum(one["tone"] == "bad" for one in data_of(page)["ranks"])
    assert 16 <= drawn < 60
    said = f"64 of 128 ranks are drawn: {drawn} of the 60 culprits, and a sample of the others."
    assert said in Elements(page).text
    report.main.culprits = []
    assert "64 of 128 ranks are drawn, a sample." in Elements(html.page(report, table)).text


def test_thousands_of_ranks_are_sampled_and_the_page_says_so():
    table = missing_rank(3000, guilty=1717, operations=3)
    report = analyze(table, stuck_after=0)
    page = html.page(report, table)
    assert "64 of 3,000 ranks are drawn: the culprit, and a sample of the others." in Elements(page).text
    data = data_of(page)
    ranks = [r["rank"] for r in data["ranks"]]
    assert len(ranks) == timeline_data.MOST_RANKS
    assert ranks == sorted(set(ranks))
    assert 1717 in ranks
    assert {0, 2999} <= set(ranks)
    assert len(page) < 500_000


def test_the_newest_operations_are_drawn_where_there_are_too_many(monkeypatch):
    monkeypatch.setattr(timeline_data, "_MOST_SLICES", 200)
    table = missing_rank(2, guilty=1, operations=60)
    page = html.page(analyze(table, stuck_after=0), table)
    data = data_of(page)
    assert "last 100 operations" not in Elements(page).text
    assert len(data["begin"]) == 119
    monkeypatch.setattr(timeline_data, "_MOST_SLICES", 100)
    page = html.page(analyze(table, stuck_after=0), table)
    assert "last 50 operations of each rank" in Elements(page).text
    assert max(data_of(page)["seq"]) == 60
    assert min(data_of(page)["seq"]) == 10


def test_all_good_and_empty():
    def program(recorder, rank):
        comm = recorder.add_comm("main", "shm", "u", "0,1", rank, 2)
        recorder.finish(recorder.begin(comm, ALL_REDUCE, 1, 1, ONE, ONE, 1))

    table = table_of(program, 2)
    report = analyze(table)
    assert report.good
    page = html.page(report, table)
    assert "verdict good" in page
    assert data_of(page)["span"] > 0
    empty = table_of(lambda recorder, rank: None, 2)
    page = html.page(analyze(empty), empty)
    assert "Timeline" not in Elements(page).text
    assert "timeline.js" not in page
    assert 'id="data"' not in page


def test_the_last_arrival_is_that_of_all_ranks():
    """The timeline of two ranks of three knows that the third came later."""
    table = missing_rank(3, guilty=-1, operations=3)
    # By more than any pause between the ranks' recording, which are this process's.
    table.created_ns[table.rank == 2] += 50_000_000_000
    table.completed_ns[table.completed_ns > 0] += 60_000_000_000
    report = analyze(table, stuck_after=0)
    report.clock_offsets_ns = {}
    line = timeline.build(report, table, [0, 1], 100)
    assert set(table.rank[line.rows]) == {0, 1}
    late = table.created_ns[table.rank == 2]
    assert np.array_equal(line.ready_ns[:2], late[:2])
    assert (line.ready_ns <= line.end_ns).all()
    report.clock_offsets_ns = {2: 50_000_000}
    aligned = timeline.build(report, table, [0, 1], 100)
    assert (aligned.ready_ns[:2] < late[:2]).all()


def test_messages_wait_for_nobody_else():
    def program(recorder, rank):
        comm = recorder.add_comm("main", "shm", "u", "0,1", rank, 2)
        if rank == 0:
            recorder.finish(recorder.begin(comm, SEND, 1, 1, ONE, [], peer=1, flags=2))
        else:
            recorder.finish(recorder.begin(comm, RECV, 1, 1, [], ONE, peer=0, flags=2 | 8))

    table = table_of(program, 2)
    line = timeline.build(analyze(table), table, [0, 1], 100)
    assert np.array_equal(line.ready_ns, line.begin_ns)
    assert data_of(html.page(analyze(table), table))["peer"] == [1, 0]


def test_the_fault_begins_on_the_aligned_clock():
    """A rank's clock that is ahead by a second does not move the mark of the fault by a second."""
    table = missing_rank(3, guilty=2)
    report = analyze(table, stuck_after=0)
    report.clock_offsets_ns = {}
    plain = timeline.since(report, table)
    assert plain == report.main.since_ns > 0
    row = int(np.flatnonzero(table.created_ns == plain)[0])
    report.clock_offsets_ns = {int(table.rank[row]): 1_000_000_000}
    assert timeline.since(report, table) == plain - 1_000_000_000


def test_an_unfinished_operation_ends_at_the_state_of_the_ranks_on_the_aligned_clock():
    job = job_of(4, training(20))
    job.live, job.skew_ns = True, {2: 3_600_000_000_000}
    job.replace_call(3, len(job.programs[3]) - 2, Action("leave"))
    builder = TableBuilder()
    for rank in range(4):
        job.run().add_to(builder, rank)
    table = builder.finish()
    table.source_of[2].as_of_ns += job.skew_ns[2]  # each source has its state by its own clock
    report = analyze(table)
    assert report.clock_offsets_ns[2] == pytest.approx(job.skew_ns[2], abs=1e9)
    line = timeline.build(report, table, range(4), 10_000)
    assert line.open.sum() == 3
    assert set(line.end_ns[line.open].tolist()) == {line.last_ns}
    assert line.last_ns == pytest.approx(table.source_of[0].as_of_ns, abs=1e9)


def test_64_ranks_take_less_than_500_kilobytes():
    """All operations that are drawn, at times of real runs, whose digits do not repeat."""
    table = Case(job_of(64, training(150)), []).table()
    times = np.random.default_rng(1).integers(0, 3_000_000, len(table))
    table.created_ns += np.sort(times)
    table.started_ns = table.created_ns.copy()
    table.completed_ns = table.created_ns + times // 3
    report = analyze(table)
    page = html.page(report, table)
    data = data_of(page)
    assert len(data["begin"]) == 64 * 250
    assert len(page.encode()) < 500_000


def test_a_cause_and_a_call_path_are_shown_and_escaped():
    table = missing_rank(4, guilty=1)
    report = analyze(table, stuck_after=0)
    path = ["train.py:18 step", "train.py:40 main", EVIL]
    report.main.cause = Cause("ValueError", f"bad {EVIL}", "train.py", 18, "step", None, "SIGABRT", path)
    elements = Elements(html.page(report, table))
    assert f"ValueError: bad {EVIL}" in elements.text
    absent = {r["rank"]: r["absent"] for r in data_of(html.page(report, table))["ranks"]}
    assert absent == {0: "", 1: "raised ValueError, not in all_reduce #5", 2: "", 3: ""}
    assert "SIGABRT" in elements.text
    assert "exit code" not in elements.text
    assert all(call in elements.text for call in path)
    assert not [tag for tag, _ in elements.found if tag == "img"]


def test_call_paths_are_folded_under_the_users_line():
    table = missing_rank(4, guilty=1)
    report = analyze(table, stuck_after=0)
    lines = [
        SimpleNamespace(file="ddp.py", line=7, function="forward", library="torch"),
        SimpleNamespace(file="train.py", line=18, function=EVIL, library=""),
    ]
    called = SimpleNamespace(ranks=[1], operation="all_reduce #5 of 'main'", path=lines, user=1)
    report.main.call_paths = [called]
    elements = Elements(html.page(report, table))
    assert "Rank 1 came to all_reduce #5 of 'main' from" in elements.text
    assert elements.text.count(f"train.py:18 {EVIL}") == 2  # as the place, and in the path
    assert "ddp.py:7 forward (torch)" in elements.text


def test_a_message_of_the_fault_is_not_a_collective_of_its_number():
    def program(recorder, rank):
        comm = recorder.add_comm("main", "shm", "u", "0-3", rank, 4)
        recorder.finish(recorder.begin(comm, ALL_REDUCE, 1, 1, ONE, ONE, 1))
        if rank == 2:
            recorder.begin(comm, SEND, 1, 2, ONE, [], peer=1, flags=2)
        else:
            recorder.begin(comm, ALL_REDUCE, 2, 2, ONE, ONE, 1)

    table = table_of(program, 4)
    report = analyze(table, stuck_after=0)
    assert (report.main.operation, report.main.seq_num, report.main.culprits) == ("send", 1, [2])
    data = data_of(html.page(report, table))
    marked = [i for i, m in enumerate(data["marked"]) if m]
    assert [data["calls"][data["call"][i]].split()[0] for i in marked] == ["send"]
