"""Forecasts: topologies, the time of an operation, and the steps of ranks with these times."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes.forked_interpreters import run
from unicomm.rehearse.details import STEP, Details
from unicomm.rehearse.forecast.cost_model import Shape, interpolated, seconds, shape_of
from unicomm.rehearse.forecast.forecast import forecast
from unicomm.rehearse.forecast.forecast_text import render
from unicomm.rehearse.forecast.timeline import Timeline
from unicomm.rehearse.forecast.topology import Link, Topology, load, to_toml
from unicomm.rehearse.play import Rules
from unicomm.rehearse.rehearsal import rehearse

pytestmark = pytest.mark.processes
MB = 1_000_000
SLOW = Topology("slow", Link(0.0, MB), Link(0.0, MB / 10))
ELEMENTS = MB // 4


def test_presets_and_files(tmp_path):
    machine = load("8xH100+400G")
    assert machine.between.bandwidth == 50e9
    assert machine.cores == 0
    assert load("cpu+10G").between.shared
    for text in ("8xH200+400G", "cpu+fast", "nothing"):
        with pytest.raises(ValueError, match="presets are like 8xH100"):
            load(text)
    file = tmp_path / "own.toml"
    text = 'preset = "cpu+10G"\ncores = 4\n[between]\nlatency = 1e-3\n'
    text += "[measured_within.all_reduce]\n2 = [[9, 1.5]]\n"
    file.write_text(text)
    own = load(str(file))
    assert (own.cores, own.between.latency, own.between.bandwidth) == (4, 1e-3, 1.25e9)
    assert own.measured_within == {"all_reduce": {2: [(9.0, 1.5)]}}
    again = tmp_path / "again.toml"
    again.write_text(to_toml(own))
    assert load(str(again)) == own
    file.write_text("[within]\nwidth = 3\n")
    with pytest.raises(ValueError, match="a link has no width"):
        load(str(file))
    file.write_text("corse = 3\n")
    with pytest.raises(ValueError, match="corse is not among"):
        load(str(file))


@pytest.mark.parametrize(
    "text",
    [
        *("cores = inf", "cores = -1", 'cores = "4"', "speed = 0", "speed = nan", "crowded = { 2 = 0 }"),
        *("[between]\nbandwidth = 0", '[within]\nbandwidth = "450 GB/s"', "[within]\nlatency = -1"),
        *(
            "[measured_within.send]\n2 = []",
            "[measured_within.send]\n2 = [[8, 0]]",
            'cores = [1]\nspeed = "x"',
        ),
    ],
)
def test_numbers_that_no_machine_has(tmp_path, text):
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"own.toml: .*(has to be a number|has no times)"):
        load(str(file))


def test_a_network_of_no_speed():
    with pytest.raises(ValueError, match="presets are like"):
        load("8xH100+0G")


def test_shapes():
    assert shape_of([0, 1, 2, 3], 8) == Shape(4, 1)
    assert shape_of([0, 8, 16], 8) == Shape(1, 3)
    assert shape_of(range(16), 8) == Shape(8, 2)


def test_the_time_of_an_operation():
    machine = Topology("x", Link(1e-5, 1e9), Link(1e-4, 1e8))
    inside, outside = Shape(4, 1), Shape(4, 2)
    assert seconds("all_reduce", 1e9, inside, machine) == pytest.approx(1.5, rel=1e-3)
    assert seconds("all_gather_single", 1e9, inside, machine) == pytest.approx(0.75, rel=1e-3)
    assert seconds("barrier", 0, inside, machine) == pytest.approx(2e-5)
    assert seconds("send", 1e6, Shape(1, 2), machine) == pytest.approx(1e-4 + 1e-2)
    assert seconds("all_reduce", 8, Shape(1, 1), machine) == 0
    # Each of the four ranks of a node reduces its quarter with the other node, over its own link.
    assert seconds("all_reduce", 1e9, outside, machine) == pytest.approx(1.5 + 2.5, rel=1e-2)
    shared = replace(machine, between=replace(machine.between, shared=True))
    assert seconds("all_reduce", 1e9, outside, shared) == pytest.approx(1.5 + 10, rel=1e-2)
    for op in ("all_reduce", "broadcast", "reduce_scatter_single", "all_to_all_single"):
        times = [seconds(op, 10.0**k, outside, machine) for k in range(10)]
        assert times == sorted(times)


def test_measured_times_count_instead():
    points = [(1000.0, 1e-3), (100_000.0, 1e-2)]
    assert interpolated(points, 10) == 1e-3
    assert interpolated(points, 10_000) == pytest.approx(10**-2.5)
    assert interpolated(points, 200_000) == pytest.approx(2e-2)
    machine = replace(SLOW, measured_within={"all_reduce": {4: points}})
    assert seconds("all_reduce", 1000, Shape(4, 1), machine) == 1e-3
    assert seconds("all_reduce", 1000, Shape(3, 1), machine) != 1e-3


def rehearsed(program, ranks=2, topology=SLOW, **more):
    done = rehearse(program, ranks, topology=topology, patience=90.0, **more)
    assert done.good, (done.report.findings, done.output)
    return done.forecast


def test_synchronous_operations_are_exposed():
    def program():
        dist.init_process_group("gloo")
        for _ in range(3):
            dist.all_reduce(torch.ones(ELEMENTS))

    found = rehearsed(program)
    assert found.exposed == pytest.approx(3.0, rel=0.05)
    assert found.hidden == pytest.approx(0.0, abs=1e-6)
    assert found.peak_bytes == MB
    (traffic,) = found.traffic
    assert (traffic.groups, traffic.size, traffic.operations, traffic.bytes) == ("default", 2, 3, 3 * MB)
    assert traffic.seconds == pytest.approx(3.0, rel=0.05)
    assert "3.0 operations" in render(found)


def test_asynchronous_operations_of_two_groups_run_side_by_side():
    def program():
        dist.init_process_group("gloo")
        other = dist.new_group([0, 1])
        works = [dist.all_reduce(torch.ones(ELEMENTS), group=g, async_op=True) for g in (None, other, other)]
        for work in works:
            work.wait()

    found = rehearsed(program)
    assert found.exposed == pytest.approx(2.0, abs=0.2)
    assert found.peak_bytes == 3 * MB


def test_gradients_of_ddp_are_awaited_at_the_end_of_the_backward_pass():
    def program():
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(500, 500, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.ones(2, 500)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = rehearsed(program)
    assert found.steps == 2
    assert found.exposed == pytest.approx(1.0, abs=0.2)
    assert found.step > found.exposed
    assert found.traffic[0].bytes == pytest.approx(MB, rel=1e-3)  # and a few for the map of parameters


def test_messages_over_nodes():
    def program():
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            dist.send(torch.ones(ELEMENTS), 1)
        else:
            dist.recv(torch.ones(ELEMENTS), 0)

    assert rehearsed(program).exposed == pytest.approx(1.0, rel=0.05)
    assert rehearsed(program, nnodes=2).exposed == pytest.approx(10.0, rel=0.05)


def test_receives_from_any_rank_and_buffered_sends_go_on():
    def from_any():
        dist.init_process_group("gloo")
        for _ in range(3):
            if dist.get_rank() == 0:
                dist.send(torch.ones(ELEMENTS), 1)
            else:
                dist.recv(torch.ones(ELEMENTS))

    def crossing():
        dist.init_process_group("gloo")
        for _ in range(3):
            dist.send(torch.ones(ELEMENTS), 1 - dist.get_rank())
            dist.recv(torch.ones(ELEMENTS), 1 - dist.get_rank())

    def with_tags():
        dist.init_process_group("gloo")
        rank, works = dist.get_rank(), []
        for tag in (1, 2) if rank else (2, 1):
            x = torch.ones(ELEMENTS * tag)
            works += [dist.isend(x, 1, tag=tag) if rank == 0 else dist.irecv(x, 0, tag=tag)]
        for work in works:
            work.wait()

    for program, rules, operations, exposed in (
        (from_any, None, 3, 3.0),
        (crossing, Rules(buffered=True), 6, 3.0),
        (with_tags, None, 2, 2.0),
    ):
        found = rehearsed(program, rules=rules)
        (traffic,) = found.traffic
        assert traffic.operations == operations, program
        assert found.exposed == pytest.approx(exposed, abs=0.2), program


def test_a_rank_waits_for_the_one_that_computes_longer():
    def program():
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(ELEMENTS))

    table = rehearse(program, 2).table
    second = 1_000_000_000
    details = {
        rank: Details(
            events=[(0, after * second, after * second), (STEP, (after + 1) * second, (after + 1) * second)]
        )
        for rank, after in ((0, 1), (1, 6))
    }
    times = Timeline(table, details, SLOW, 2).run()
    assert times[0].exposed == [(1.0, 7.0)]
    assert times[1].exposed == [(6.0, 7.0)]
    assert (times[0].steps, times[1].steps) == ([8.0], [8.0])
    # Two ranks on one core compute at half the speed.
    crowded = replace(SLOW, cores=1)
    assert Timeline(table, details, crowded, 2).run()[1].exposed == [(12.0, 13.0)]
    assert forecast(Timeline(table, details, SLOW, 2)).exposed == pytest.approx(3.5)
    # Or at the speed that was measured for two ranks of a host.
    measured = replace(SLOW, cores=2, crowded={2: 2.0})
    assert Timeline(table, details, measured, 2).run()[1].exposed == [(12.0, 13.0)]


def test_the_command(tmp_path):
    program = tmp_path / "program.py"
    text = "import torch\nimport torch.distributed as dist\n"
    text += "dist.init_process_group('gloo')\ndist.all_reduce(torch.ones(8))\n"
    program.write_text(text)
    command = [sys.executable, "-m", "unicomm", "rehearse", "--nproc-per-node", 2, "--topology"]
    done = run([*command, "8xH100+400G", "--json", program])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["forecast"]["traffic"][0]["bytes"] == 32
    done = run([*command, "8xH100+400G", program])
    assert "forecast for 2 ranks on 8xH100+400G" in done.stdout
    done = run([*command, "9xH100", program])
    assert done.returncode == 2
    assert "presets are like" in done.stderr


def test_measured_operations_become_a_topology(tmp_path):
    file = tmp_path / "machine.toml"
    done = run([sys.executable, "-m", "unicomm", "bench", "--save", file, "--ranks", 2, "--most", 12])
    assert done.returncode == 0, done.stdout + done.stderr
    measured = load(str(file)).measured_within
    assert load(str(file)).crowded[2] >= 1
    assert set(measured) >= {"all_reduce", "all_gather_single", "reduce_scatter_single", "send"}
    assert all(0 < t < 60 for by_size in measured.values() for points in by_size.values() for _, t in points)


def test_what_if(tmp_path):
    step = Path(__file__).parent.parent.parent / "benchmarks/ddp_step.py"
    command = [sys.executable, "-m", "unicomm", "rehearse", "--nproc-per-node", 2, "--topology", "cpu+10G"]
    changes = ["--what-if", "nnodes=2", "--what-if", "bucket_cap_mb=0.01"]
    done = run([*command, *changes, "--json", step, 64, 4, 4])
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    base, twice, buckets = (
        said["forecast"],
        *(said["what_if"][name] for name in ("nnodes=2", "bucket_cap_mb=0.01")),
    )
    assert (base["ranks"], twice["ranks"], buckets["ranks"]) == (2, 4, 2)

    def operations(forecast):
        return sum(each["operations"] for each in forecast["traffic"])

    assert operations(buckets) > operations(base) + 2  # a bucket for each layer
    done = run([*command, *changes[:2], step, 64, 4, 4])
    assert "what if:" in done.stdout
    assert "nnodes=2" in done.stdout
    program = tmp_path / "two.py"
    program.write_text(
        "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1 + dist.get_rank() // 2))\n"
    )
    done = run([*command, *changes[:2], "--json", program])
    assert json.loads(done.stdout)["what_if"] == {"nnodes=2": None}  # four ranks do not fit together
    assert "no forecast" in run([*command, *changes[:2], program]).stdout
    for change, why in (("nodes=2", "nnodes"), ("nnodes=two", "no number"), ("nnodes=0", "positive")):
        done = run([*command, "--what-if", change, step, 64, 4, 4])
        assert done.returncode == 2
        assert why in done.stderr
    done = run([*command[:6], "--what-if", "nnodes=2", step, 64, 4, 4])
    assert done.returncode == 2
    assert "give a --topology" in done.stderr
