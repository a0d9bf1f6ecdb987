"""Names that tell groups apart, and messages, in every report on one real job of 4 ranks."""

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.commands import clean_environment, torchrun
from tests.processes.forked_interpreters import run
from tests.profiler.traces import decode, load
from unicomm.launch.cli import app

PROGRAM = Path(__file__).parent / "programs" / "groups.py"
NAMES = {
    "default",
    "ranks 0-1",
    "ranks 0-1 #2",
    "evaluation (ranks 0-1)",
    "mesh_dp (ranks 0,2)",
    "mesh_dp (ranks 1,3)",
    "mesh_tp (ranks 0-1)",
    "mesh_tp (ranks 2-3)",
}

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


def switched(folder):
    more = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "UNICOMM_TRACE_KEEP": "always"}
    return clean_environment() | more | {"UNICOMM_TRACE_DIR": str(folder)}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder with the traces of a job, and in it `rings`."""
    folder = tmp_path_factory.mktemp("groups")
    rings = folder / "rings"
    rings.mkdir(mode=0o700)
    done = run([*torchrun(4), PROGRAM, folder], within=150, env=switched(rings))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return folder


def command(*words, codes=(0,)):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "140"})
    assert done.exit_code in codes, done.output
    return done.stdout


def traces(job):
    return [job / f"rank{rank}.json" for rank in range(4)]


def shown(job, *options):
    return json.loads(command("trace", "show", job / "rings", "--json", *options))["processes"]


def test_the_recorder_tells_groups_apart(job):
    text = command("trace", "show", job / "rings")
    assert {found[0] for found in re.findall(r"communicator '((\w|[ (),#-])+)'", text)} == NAMES
    processes = shown(job)
    assert {c["name"] for p in processes for c in p["communicators"]} == NAMES
    for process in processes:
        assert len(process["trace"]["pg_config"]) == len(process["communicators"])
    ranks = {c["name"]: c["ranks"] for p in processes for c in p["communicators"]}
    assert (ranks["default"], ranks["mesh_dp (ranks 1,3)"], ranks["ranks 0-1 #2"]) == ("0-3", "1,3", "0-1")


def test_dumps_keep_all_groups(job, tmp_path):
    """The groups of new_group([0, 1]) twice are two groups in dumps as well, and their ranks fit together."""
    for process in shown(job):
        path = tmp_path / f"rank{process['rank']}.json"
        path.write_text(json.dumps(process["trace"]))
    report = json.loads(command("trace", "analyze", tmp_path, "--json", codes=(0, 1)))
    assert report["verdict"] in ("all-good", "alive-but-slow"), report  # ranks on a busy machine may be late
    assert report["input"]["groups"] == len(NAMES)
    # One rank's ring beside the dumps of the others.
    (tmp_path / "rank2.json").unlink()
    (ring,) = [Path(p["path"]) for p in shown(job) if p["rank"] == 2]
    os.link(ring, tmp_path / ring.name)
    report = json.loads(command("trace", "analyze", tmp_path, "--json", codes=(0, 1)))
    assert report["verdict"] in ("all-good", "alive-but-slow"), report
    assert report["input"]["groups"] == len(NAMES)
    assert report["input"]["present"] == 4


def test_reports_of_the_profiler_tell_groups_apart(job):
    for inputs in (traces(job), [job / "rings"]):
        data = json.loads(command("profile", "report", "--json", *inputs))
        rows = [(o["group"], o["op"]) for o in data["operations"]]
        assert len(set(rows)) == len(rows)
        assert {o["group"] for o in data["operations"]} == NAMES
        members = {o["group"]: o["members"] for o in data["operations"]}
        assert (members["mesh_tp (ranks 2-3)"], members["default"]) == ("2-3", "0-3")
    described = {o["group"]: o["description"] for o in json.loads(command(*_json(job)))["operations"]}
    assert described["mesh_tp (ranks 2-3)"] == "mesh_tp"
    assert described["ranks 0-1"] == described["default"] == ""


def _json(job):
    return ["profile", "report", "--json", *traces(job)]


def test_messages_are_counted_with_their_bytes(job):
    """Rank 1 sends 4 messages of 4000 bytes, rank 2 as many and one of 2000 bytes."""
    for inputs in (traces(job), [job / "rings"]):
        data = json.loads(command("profile", "report", "--json", *inputs))
        counted = {o["op"]: (o["count"], o["bytes"]) for o in data["operations"]}
        messages = {op: counted[op] for op in ("send", "recv")}
        assert messages == {"send": (9, 34000), "recv": (9, 34000)}


def test_tracks_of_merged_traces_tell_groups_apart(job, tmp_path):
    command("profile", "merge", *traces(job), "-o", tmp_path / "m.json")
    tracks = {}
    for e in load(tmp_path / "m.json")["traceEvents"]:
        if e["ph"] == "M" and str(e["args"].get("name", "")).startswith("unicomm: "):
            tracks.setdefault(e["pid"], []).append(e["args"]["name"])
    assert all(len(set(of_rank)) == len(of_rank) for of_rank in tracks.values())
    assert {name.removeprefix("unicomm: ") for of_rank in tracks.values() for name in of_rank} == NAMES


def test_flows_of_messages_go_from_send_to_receive(job, tmp_path):
    command("profile", "merge", *traces(job), "-o", tmp_path / "m.json")
    events = load(tmp_path / "m.json")["traceEvents"]
    slices = {}
    for e in events:
        if e["ph"] == "X" and e.get("cat") == "unicomm" and e["name"] in ("unicomm::send", "unicomm::recv"):
            slices.setdefault((e["pid"], e["tid"]), []).append(e)
    steps = {}
    for e in events:
        if e["ph"] in ("s", "f") and e.get("cat") == "message":
            steps.setdefault((e["name"], e["id"]), []).append(e)
    assert len(steps) == 9
    waited = 0
    for both in steps.values():
        begin, end = sorted(both, key=lambda e: e["ph"] != "s")
        assert (begin["ph"], end["ph"]) == ("s", "f")
        assert begin["ts"] < end["ts"]  # viewers drop a flow that ends before it begins
        (sent,), (got,) = (
            [s for s in slices[e["pid"], e["tid"]] if s["ts"] <= e["ts"] <= s["ts"] + s["dur"]]
            for e in (begin, end)
        )
        assert (sent["name"], got["name"]) == ("unicomm::send", "unicomm::recv")
        assert sent["args"]["seq_num"] == got["args"]["seq_num"]
        assert {sent["args"]["peer"] + 1, got["args"]["peer"] + 1} == {sent["pid"], got["pid"]}
        waited += got["ts"] < sent["ts"]
    assert waited >= 4  # those of rank 0, which begin before their sends


def test_flows_of_messages_in_perfettos_format(job, tmp_path):
    pytest.importorskip("perfetto.protos")
    command("profile", "merge", *traces(job), "-o", tmp_path / "m.pftrace")
    flows = [steps for steps in decode(tmp_path / "m.pftrace").flows.values() if len(steps) == 2]
    between = [(a, b) for a, b in flows if a[0] != b[0] and "unicomm::all_reduce" not in (a[1], b[1])]
    assert len(between) == 9
    for (_, sent, _), (_, got, _) in between:
        assert sent == "unicomm::send"
        assert got in ("unicomm::recv", "transfer")


@pytest.mark.parametrize("how", ["", "--raw", "--json"])
def test_show_obeys_its_filters(job, how):
    folder = job / "rings"
    words = ["trace", "show", folder, *([how] if how else [])]

    def rows(*options):
        """(rank, communicator, number) of each shown record."""
        out = command(*words, *options)
        if how == "--json":
            return [
                (p["rank"], e["process_group"][0], e["p2p_seq_id"] or e["collective_seq_id"])
                for p in json.loads(out)["processes"]
                for e in p["trace"]["entries"]
            ]
        if how == "--raw":
            cells = [[c.strip() for c in line.split("│")] for line in out.splitlines() if "│" in line]
            return [(int(c[0]), c[2], int(c[3])) for c in cells if c[0]]
        return out

    if not how:
        text = rows("--rank", "3", "--last", "2")
        assert {"mesh_tp (ranks 2-3)", "mesh_dp (ranks 1,3)", "default"} == set(
            re.findall(r"communicator '([^']+)'", text)
        )
        assert "rank 3" in text
        assert "rank 2" not in text
        return
    assert {rank for rank, _, _ in rows("--rank", "3")} == {3}
    assert {rank for rank, _, _ in rows("--rank", "3", "--rank", "0")} == {0, 3}
    mine = rows("--comm", "ranks 0-1 #2", "--last", "0")
    assert sorted(mine) == [(rank, "ranks 0-1 #2", n) for rank in (0, 1) for n in (1, 2, 3, 4)]
    assert {row[:2] for row in rows("--comm", "mesh_tp")} == {  # the description stands for all its groups
        *((rank, "mesh_tp (ranks 0-1)") for rank in (0, 1)),
        *((rank, "mesh_tp (ranks 2-3)") for rank in (2, 3)),
    }
    mine = rows("--comm", "ranks 0-1 #2", "--rank", "1", "--last", "2")
    assert mine == [(1, "ranks 0-1 #2", 3), (1, "ranks 0-1 #2", 4)]
    assert len(rows("--last", "1")) == 4 + 7 * 2  # default of 4 ranks, and 7 groups of 2 ranks


def test_a_deadlock_names_both_groups(tmp_path):
    rings = tmp_path / "rings"
    rings.mkdir(mode=0o700)
    done = run([*torchrun(2), PROGRAM, "deadlock"], within=100, env=switched(rings))
    assert done.returncode != 0
    frames = re.findall(r'(?m)File "([^"]+)", line', done.stderr)
    assert any(frame.endswith("programs/groups.py") for frame in frames)
    assert not [frame for frame in frames if "/unicomm/" in frame]  # a victim's traceback has its own lines
    assert "rank 0 of 'ranks 0-1' in all_reduce #1" in done.stderr
    assert "rank 1 of 'ranks 0-1 #2' in all_reduce #1" in done.stderr
    report = json.loads(command("trace", "analyze", rings, "--json", codes=(1,)))
    assert report["verdict"] == "wait-cycle-across-groups"
    assert {edge["group"] for edge in report["edges"]} == {"ranks 0-1", "ranks 0-1 #2"}
