"""Comparing the data of two runs, and of the ranks of one, by the checksums in their rings."""

import json
import os

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.flight_recorder.analysis.test_diff import text_of
from tests.flight_recorder.reports.test_html import table_of
from tests.flight_recorder.rings import ALL_REDUCE, META, RECV, SEND
from unicomm import _core
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.diff import compare
from unicomm.flight_recorder.formats.dump_columns import from_dump
from unicomm.flight_recorder.formats.torch_dump import to_dict
from unicomm.flight_recorder.reports import report_data, report_html, report_markdown, report_text
from unicomm.flight_recorder.ring.reader import (
    COMPARED,
    INPUT_CHECKSUM,
    OUTPUT_CHECKSUM,
    P2P,
    RECEIVE,
    read_ring,
)
from unicomm.flight_recorder.table.builder import TableBuilder
from unicomm.launch.cli import app

X = [torch.ones(8)]


def checked(recorder, record, given, result):
    if given is not None:
        recorder.add_checksum(record, INPUT_CHECKSUM, given)
    if result is not None:
        recorder.add_checksum(record, OUTPUT_CHECKSUM, result)
    recorder.finish(record)


def run(
    ranks=3,
    operations=4,
    inputs=None,
    outputs=None,
    compared=True,
    checksums=True,
    messages=False,
    as_dumps=False,
):
    """All-reduces, each followed by a message from rank 0 to rank 1. `inputs` and `outputs`: other data, by
    (rank, number of the all-reduce) or ("send" or "recv", number)."""
    inputs, outputs = inputs or {}, outputs or {}

    def program(recorder, rank):
        comm = recorder.add_comm("main", "shm", "u", f"0-{ranks - 1}", rank, ranks)
        for seq in range(1, operations + 1):
            record = recorder.begin(comm, ALL_REDUCE, seq, seq, X, X, 1)
            if checksums:
                given = inputs.get((rank, seq), (1 << 63) + 10 * rank + seq)
                checked(recorder, record, given, outputs.get((rank, seq), 1000 + seq))
                if compared:
                    recorder.add_flags(record, COMPARED)
            else:
                recorder.finish(record)
            if messages and rank < 2:
                op, flags = (SEND, P2P) if rank == 0 else (RECV, P2P | RECEIVE)
                ins, outs = (X, []) if rank == 0 else ([], X)
                record = recorder.begin(comm, op, seq, 0, ins, outs, 0, 1 - rank, flags)
                which = "send" if rank == 0 else "recv"
                value = (inputs if rank == 0 else outputs).get((which, seq), 5000 + seq)
                checked(recorder, record, *((value, None) if rank == 0 else (None, value)))

    if not as_dumps:
        return table_of(program, ranks, 64)
    builder = TableBuilder()
    for rank in range(ranks):
        recorder = _core.Recorder("", META, rank, ranks, 64)
        program(recorder, rank)
        dump = to_dict(read_ring(recorder.snapshot()))
        builder.add_dump(from_dump(json.loads(json.dumps(dump))), f"rank_{rank}", rank, "JSON")
    return builder.finish()


def test_the_same_data():
    found = compare(run(), run())
    assert found.same
    assert (found.data.first, found.data.compared, found.data.missing) == (None, 12, "")
    assert "12 operations, the data of 12 of them too" in text_of(found)


def test_an_input_that_differs():
    """The output of all ranks differs with it, and what follows."""
    later = {(r, s): 7000 + s for r in range(3) for s in (2, 3, 4)}
    found = compare(run(), run(inputs={(1, 2): 99}, outputs=later))
    first = found.data.first
    assert (first.input_ranks, first.output_ranks, first.only_output) == ([1], [0, 1, 2], False)
    assert (first.group, first.seq_num, first.operation) == ("main", 2, "all_reduce float32[8] SUM")
    assert first.where.startswith(__file__)
    assert first.later == 3
    assert not found.same
    assert not found.differences
    text = " ".join(text_of(found).split())
    assert "rank 1, #2 of 'main'" in text
    assert "the input differs on rank 1, and then the output on ranks 0-2" in text
    assert f"{__file__}:" in text


@pytest.mark.parametrize("which", [(True, True), (False, True), (True, False)])
def test_dumps_and_rings(which):
    a, b = run(as_dumps=which[0]), run(inputs={(1, 2): 99}, outputs={(1, 2): 98}, as_dumps=which[1])
    found = compare(a, b)
    first = found.data.first
    assert (first.input_ranks, first.output_ranks, first.seq_num) == ([1], [1], 2)
    assert first.where.startswith(__file__)
    assert not found.differences
    assert analyze(b).main.verdict.value == "silent-corruption"


def test_only_an_output_differs():
    found = compare(run(), run(outputs={(2, 3): 5}))
    first = found.data.first
    assert (first.input_ranks, first.output_ranks, first.only_output) == ([], [2], True)
    assert (first.seq_num, first.later) == (3, 1)
    assert "only the output differs, on rank 2" in " ".join(text_of(found).split())


def test_a_message_whose_data_differ():
    found = compare(run(messages=True), run(messages=True, inputs={("send", 2): 1}, outputs={("recv", 2): 1}))
    first = found.data.first
    assert (first.input_ranks, first.output_ranks, first.seq_num) == ([0], [1], 2)
    assert first.operation.startswith("send")
    found = compare(run(messages=True), run(messages=True, outputs={("recv", 3): 1}))
    first = found.data.first
    assert (first.input_ranks, first.output_ranks, first.seq_num) == ([], [1], 3)


def test_only_operations_that_are_alike_are_compared():
    found = compare(run(operations=3), run(operations=4, outputs={(0, 4): 1}))
    assert found.data.first is None
    assert found.data.compared == 9
    assert len(found.differences) == 1


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [(False, False, "Neither run has"), (False, True, "Run A has no"), (True, False, "Run B has no")],
)
def test_runs_without_checksums(a, b, said):
    found = compare(run(checksums=a), run(checksums=b))
    assert found.same
    assert found.data.missing.startswith(said)
    assert "UNICOMM_CHECKSUM=1" in found.data.missing
    assert found.data.missing.count(".") == 1
    assert "UNICOMM_CHECKSUM=1" in " ".join(text_of(found).split())


# --- one run -----------------------------------------------------------------------------------------------


def test_ranks_of_one_run_with_other_bits():
    report = analyze(run(outputs={(1, 3): 5, (1, 4): 6}))
    main = report.main
    assert (main.verdict.value, main.culprits, main.victims) == ("silent-corruption", [1], [0, 2])
    assert (main.group, main.seq_num, main.operation) == ("main", 3, "all_reduce")
    assert "Rank 1 has other bits than ranks 0, 2 in the result of all_reduce #3 of 'main'" in main.sentence
    assert f"at {__file__}:" in main.sentence
    assert any("1 later operations" in line for line in main.evidence)
    assert [side.ranks for side in main.sides] == [[0, 2], [1]]
    assert [f.verdict.value for f in report.findings] == ["silent-corruption"]


def test_results_that_were_not_compared_may_differ():
    assert analyze(run(outputs={(1, 3): 5}, compared=False)).good


def test_all_forms_of_the_report():
    table = run(outputs={(1, 3): 5})
    report = analyze(table)
    console = Console(width=300, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(report_text.render(report))
    for text in (
        console.export_text(),
        report_data.to_json(report),
        report_markdown.to_markdown(report),
        report_html.page(report, table),
    ):
        assert "silent-corruption" in text
        assert "Rank 1 has other bits than ranks 0, 2" in text
        assert f"{5:016x}" in text


def test_show_has_the_columns(tmp_path):
    recorder = _core.Recorder(str(tmp_path / "a.ucring"), META, 0, 1, 16)
    recorder.add_comm("main", "shm", "u", "0", 0, 1)
    plain = recorder.begin(0, ALL_REDUCE, 1, 1, X, X, 1)
    recorder.finish(plain)
    shown = CliRunner().invoke(app, ["trace", "show", str(tmp_path), "--raw"])
    assert "checksum" not in shown.output
    checked(recorder, recorder.begin(0, ALL_REDUCE, 2, 2, X, X, 1), 0x123456789ABCDEF0, 17)
    ring = read_ring(tmp_path / "a.ucring")
    assert [int(r["flags"]) for r in ring.records] == [0, INPUT_CHECKSUM | OUTPUT_CHECKSUM]
    shown = CliRunner().invoke(app, ["trace", "show", str(tmp_path), "--raw"], env={"COLUMNS": "250"})
    assert "123456789abcdef0" in shown.output
    assert "0000000000000011" in shown.output
    trace = json.loads(CliRunner().invoke(app, ["trace", "show", str(tmp_path), "--json"]).output)
    entries = trace["processes"][0]["trace"]["entries"]
    assert "unicomm_input_checksum" not in entries[0]
    assert entries[1]["unicomm_input_checksum"] == "123456789abcdef0"


def test_a_record_that_is_used_again_has_no_old_checksum(tmp_path):
    recorder = _core.Recorder(str(tmp_path / "a.ucring"), "{}", 0, 1, 16)
    recorder.add_comm("main", "shm", "u", "0", 0, 1)
    for seq in range(1, 17):
        checked(recorder, recorder.begin(0, ALL_REDUCE, seq, seq, X, X, 1), 7, 8)
    last = recorder.begin(0, ALL_REDUCE, 17, 17, X, X, 1)
    recorder.add_checksum(1, INPUT_CHECKSUM, 9)  # a record that is overwritten
    ring = read_ring(tmp_path / "a.ucring")
    assert int(ring.records[-1]["id"]) == last
    assert int(ring.records[-1]["flags"]) == 0
    assert recorder.place(last).startswith(__file__)
    assert recorder.place(1) == recorder.place(999) == ""
