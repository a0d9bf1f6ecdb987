"""What comes out: text, JSON and its schema, Markdown, reports without names, exit codes."""

import json
import sys

import pytest
from rich.console import Console

from tests import ROOT
from tests.commands import run
from unicomm.flight_recorder import corpus
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.corpus.simulated_job import Action, SimulatedJob
from unicomm.flight_recorder.reports import report_data, report_markdown
from unicomm.flight_recorder.reports.report_text import render

CASES = {case.name: case for case in corpus.cases(8)}


def fits(value, schema, root, path="$"):
    """Holds a value to the parts of JSON Schema that report.schema.json uses."""
    known = {"$schema", "$ref", "$defs", "title", "description", "type", "required", "properties", "items"}
    known |= {"allOf", "enum", "const", "minimum", "maximum", "minItems", "additionalProperties"}
    assert set(schema) <= known, set(schema) - known
    if "$ref" in schema:
        fits(value, root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], root, path)
    for part in schema.get("allOf", ()):
        fits(value, part, root, path)
    types = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    if "type" in schema:
        wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        assert any(isinstance(value, types[one]) for one in wanted), path
    assert "enum" not in schema or value in schema["enum"], path
    assert "const" not in schema or value == schema["const"], path
    assert schema.get("minimum", value) <= value if "minimum" in schema else True, path
    assert value <= schema["maximum"] if "maximum" in schema else True, path
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= set(value), path
        for key, inner in value.items():
            if key in schema.get("properties", {}):
                fits(inner, schema["properties"][key], root, f"{path}.{key}")
            elif "additionalProperties" in schema:
                fits(inner, schema["additionalProperties"], root, f"{path}.{key}")
    if isinstance(value, list):
        assert len(value) >= schema.get("minItems", 0), path
        for i, inner in enumerate(value):
            fits(inner, schema.get("items", {}), root, f"{path}[{i}]")


@pytest.mark.parametrize("name", [n for n in CASES if "/8/" in n or "/3/" in n])
def test_json_fits_its_schema_and_the_text_its_screen(name):
    report = analyze(CASES[name].table())
    data = json.loads(report_data.to_json(report))
    schema = report_data.schema()
    fits(data, schema, schema)
    assert data["verdict"] == report.main.verdict.value
    console = Console(width=100, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(render(report))
    text = capture.get()
    assert report.main.verdict.value in text
    assert len(text.splitlines()) <= 48, text
    assert max(len(line) for line in text.splitlines()) <= 100
    markdown = report_markdown.to_markdown(report)
    assert markdown.startswith(f"## {report.main.verdict.value}\n")


def test_the_schema_has_all_verdicts_and_notices_wrong_data():
    schema = report_data.schema()
    assert set(schema["$defs"]["verdict"]["enum"]) == {kind.value for kind in Verdict}
    data = report_data.as_data(analyze(next(iter(CASES.values())).table()))
    for key, wrong in (("verdict", "odd"), ("culprits", [-1]), ("confidence", 2), ("findings", [])):
        with pytest.raises(AssertionError):
            fits(data | {key: wrong}, schema, schema)


def test_verdicts_have_their_page():

    text = (ROOT / "docs" / "trace" / "verdicts.md").read_text()
    for kind in Verdict:
        assert f"\n## {kind.value}\n" in text, kind


@pytest.fixture
def folder(tmp_path):
    """A job of 4 in which rank 1 calls something else, with ranks 0 and 3 on other hosts."""
    calls = [Action("all_reduce", red="SUM", line=7)] * 6
    job = SimulatedJob(4, [calls] * 4, hosts=1)
    job.change(1, 4, op="barrier", red="", line=9)
    job.run()
    rings = tmp_path / "secret-place"
    rings.mkdir()
    for rank in range(4):
        (rings / f"rank{rank}.ucring").write_bytes(job.ring(rank))
    (rings / "broken-rank9").write_bytes(b"\x80nothing")
    return rings


def command(*args):
    done = run([sys.executable, "-m", "unicomm", "trace", "analyze", *map(str, args)])
    assert "Traceback" not in done.stderr
    return done


def test_command(folder, tmp_path):
    done = command(folder)
    assert done.returncode == 1
    assert "Rank 1 called barrier at /job/train.py:9" in " ".join(done.stdout.replace("│", "").split())
    assert "broken-rank9" in done.stdout.replace("\n", "")  # its path may be as long as a line
    data = json.loads(command(folder, "--json").stdout)
    assert (data["verdict"], data["culprits"], data["victims"]) == ("wrong-operation", [1], [0, 2, 3])
    assert (data["group"], data["seq_num"], data["operation"]) == ("world", 5, "all_reduce")
    assert command(folder, "--markdown").stdout.startswith("## wrong-operation")
    healthy = tmp_path / "healthy"
    healthy.mkdir()
    job = SimulatedJob(2, [[Action("barrier")] * 3] * 2).run()
    for rank in range(2):
        (healthy / f"{rank}").write_bytes(job.ring(rank))
    assert command(healthy).returncode == 0
    for nothing in (tmp_path / "nowhere", folder / "broken-rank9"):
        done = command(nothing)
        assert done.returncode == 2
        assert nothing.name in done.stderr


def test_share_has_no_folders_hosts_and_pids(folder):
    for form in ("--json", "--markdown"):
        text = command(folder, "--share", form).stdout
        assert "train.py:9" in text
        for secret in ("/job", "secret-place", "node0", "node1", "10001"):
            assert secret not in text, (form, secret)
    case = CASES["blocked-in-the-program/8/rings"]
    table = case.table()
    report = analyze(table)
    assert "pid 10" in " ".join(report.main.evidence)
    clean = report_data.to_json(report_data.shared(report, table))
    assert "node0" not in clean
    assert "host0" in clean
    assert "pid N" in clean
    assert "node0" in report_data.to_json(report)


def test_share_keeps_the_hosts_apart_that_are_named_as_its_own():
    job = SimulatedJob(4, [[Action("barrier", line=7)] * 3] * 4, live=True, hosts=1)
    job.replace_call(2, 2, Action("die"))
    table = job.run().table()
    for rank, source in enumerate(table.sources):
        source.host = f"host{rank + 1}"
    report = analyze(table)
    assert "process killed, pid 10002 on host3" in report.main.evidence[0]
    assert "process killed, pid N on host2" in report_data.shared(report, table).main.evidence[0]


def test_share_keeps_the_names_of_groups():
    names = ("dp/0", "tp/0 (inner)")
    calls = [Action("all_reduce", group=name, red="SUM", line=10) for name in names] * 3
    job = SimulatedJob(4, [calls] * 4, groups=dict.fromkeys(names, range(4)), live=True)
    job.replace_call(3, 4, Action("leave"))
    table = job.run().table()
    report = analyze(table)
    clean = report_data.shared(report, table).main
    assert clean.sentence == report.main.sentence.replace("/job/", "")
    assert "all_reduce #3 of 'dp/0'" in clean.sentence
    assert any("'tp/0 (inner)'" in line for line in clean.evidence)
    assert "/job" not in " ".join([clean.sentence, *clean.evidence])


def test_text_and_markdown_say_how_many_sides_they_leave_out():
    calls = [[Action("all_reduce", red="SUM", numel=100 + max(rank, 1))] for rank in range(12)]
    report = analyze(SimulatedJob(12, calls).run().table())
    assert len(report.main.sides) == 11
    console = Console(width=100)
    with console.capture() as capture:
        console.print(render(report))
    assert "and 6 more; --json has all" in capture.get()
    assert "\n\nand 3 more; --json has all\n" in report_markdown.to_markdown(report)
    report.main.sides = report.main.sides[:5]
    with console.capture() as capture:
        console.print(render(report))
    assert "more; --json" not in capture.get() + report_markdown.to_markdown(report)


def test_a_folder_that_is_not_there_is_told_before_the_work(folder, tmp_path):
    done = command(folder, "--html", tmp_path / "none" / "x.html")
    assert done.returncode == 2
    assert "does not exist" in done.stderr
