"""The hint `wire`: bits, bounds, refusals and counts, on all backends that have it."""

import io
import re

import pytest
import torch
from rich.console import Console

import unicomm
from tests.comms import inside
from unicomm import ReduceOp, _core
from unicomm.comms.execution.profiling import events as profiling
from unicomm.flight_recorder.formats.torch_dump import to_dict
from unicomm.flight_recorder.recording import writer
from unicomm.flight_recorder.reports.rings_text import Selection, render_raw
from unicomm.flight_recorder.ring.reader import read_ring
from unicomm.testing import run_ranks

FORMATS = ("bfloat16", "float8_e4m3fn", "int8", "mxfp8")
SUM, AVG = ReduceOp.SUM, ReduceOp.AVG
COUNT = 70001
#: As (backend, hosts of the ranks).
PLACES = [
    *(("shm", "aaa"), ("gloo", "abc"), ("tcp", "abc")),
    *(("auto", "aabb"), ("auto", "aab"), ("auto", "abab"), ("auto", "aaabbc")),
]


def run(program, place, **hints):
    backend, hosts = place
    if backend == "auto":
        hints["hosts"] = ",".join(hosts)
    return run_ranks(program, len(hosts), backend=backend, hints=hints or None)


def values(rank, count=COUNT, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * (1 + rank)).to(dtype)


def bound(x, fmt):
    """The most that encoding may change each element of x."""
    if fmt == "bfloat16":
        return x.abs() / 256
    block = 128 if fmt == "float8_e4m3fn" else 32
    whole = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    # Parts begin anywhere, so a block of the operation may lie in two of these.
    most = torch.nn.functional.max_pool1d(whole.abs().amax(1)[None], 3, 1, 1)[0]
    most = most.repeat_interleave(block)[: x.numel()]
    return most / 127 if fmt == "int8" else torch.maximum(x.abs() / 16, most / 229376)


def bits(tensor):
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_all_reduce_has_the_same_bits_everywhere_and_keeps_its_bound(place, fmt):
    def program(comm):
        found = []
        for op in (SUM, AVG, ReduceOp.PREMUL_SUM(0.5)):
            x = values(comm.get_rank())
            comm.all_reduce(x, op, hints={"wire": fmt})
            found.append(x)
        return found

    everyone, size = run(program, place), len(place[1])
    inputs = [values(r).double() for r in range(size)]
    total = sum(inputs)
    # What is encoded: each rank's elements, or the sums of hosts, which are no better; then the sum.
    allowed = sum(bound(x, fmt) for x in inputs)
    if place[0] == "auto":
        hosts = {h: [r for r, name in enumerate(place[1]) if name == h] for h in place[1]}
        allowed = torch.maximum(allowed, sum(bound(sum(inputs[r] for r in m), fmt) for m in hosts.values()))
    allowed = allowed + bound(total.abs() + allowed, fmt) + total.abs() * 1e-6
    for number, factor in enumerate((1.0, 1 / size, 0.5)):
        assert len({bits(found[number]) for found in everyone}) == 1
        error = (everyone[0][number].double() - total * factor).abs()
        assert bool((error <= allowed * factor * 1.001).all())
        assert bool((error > 0).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_reduce_scatter_keeps_its_bound(place, dtype):
    size = len(place[1])

    def program(comm):
        me, outs = comm.get_rank(), []
        parts = [values(size * me + r, 3000, dtype) for r in range(size)]
        for name in ("reduce_scatter", "reduce_scatter_v", "reduce_scatter_single"):
            out = torch.empty(3000, dtype=dtype)
            given = torch.cat(parts) if name.endswith("single") else [p.clone() for p in parts]
            getattr(comm, name)(out, given, SUM, hints={"wire": "int8"})
            assert bits(torch.cat([*given]) if isinstance(given, list) else given) == bits(torch.cat(parts))
            outs.append(out)
        assert bits(outs[0]) == bits(outs[1]) == bits(outs[2])
        return outs[0]

    for me, got in enumerate(run(program, place)):
        inputs = [values(size * r + me, 3000, dtype).double() for r in range(size)]
        total = sum(inputs)
        allowed = sum(bound(x, "int8") for x in inputs) * (2 if place[0] == "auto" else 1)
        allowed = allowed + total.abs() * {2: 2.0**-7, 4: 1e-6}[dtype.itemsize]
        assert bool(((got.double() - total).abs() <= allowed).all())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_gathers_have_the_same_bits_on_all_ranks_also_on_the_sender(place, fmt):
    size = len(place[1])

    def program(comm):
        me, found = comm.get_rank(), []
        for count in (1000, 1025, 5000):
            x, hints = values(me, count), {"wire": fmt}
            one = torch.empty(size * count)
            comm.all_gather_single(one, x, hints=hints)
            listed = [torch.empty(count) for _ in range(size)]
            comm.all_gather(listed, x, hints=hints)
            uneven = [torch.empty(count + 7 * r) for r in range(size)]
            comm.all_gather_v(uneven, values(me, count + 7 * me), hints=hints)
            assert bits(torch.cat(listed)) == bits(one)
            found += [one, torch.cat(uneven)]
        return found

    everyone = run(program, place)
    assert all([bits(x) for x in found] == [bits(x) for x in everyone[0]] for found in everyone)
    for number, count in enumerate((1000, 1025, 5000)):
        x = torch.cat([values(r, count) for r in range(size)])
        error = (everyone[0][2 * number] - x).abs()
        assert bool((error == 0).all()) == (count <= 1024)  # small parts travel as they are
        assert bool((error <= torch.cat([bound(values(r, count), fmt) for r in range(size)])).all())


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_all_to_all_rounds_what_leaves_the_host(place):
    size, hosts = len(place[1]), place[1]

    def program(comm):
        me, hints, found = comm.get_rank(), {"wire": "mxfp8"}, {}
        ins = [values(size * me + r, 2000) for r in range(size)]
        outs = [torch.empty(2000) for _ in range(size)]
        comm.all_to_all(outs, ins, hints=hints)
        single = torch.empty(size * 2000)
        comm.all_to_all_single(single, torch.cat(ins), hints=hints)
        assert bits(single) == bits(torch.cat(outs))
        splits = [1000 * (1 + (me + r) % 3) for r in range(size)]
        parts = [values(size * me + r, n) for r, n in enumerate(splits)]
        got = torch.empty(sum(splits))
        comm.all_to_all_v_single(got, torch.cat(parts), splits, splits, hints=hints)
        for r, (part, n) in enumerate(zip(got.split(splits), splits, strict=True)):
            error = (part - values(size * r + me, n)).abs()
            near = r == me or (place[0] == "auto" and hosts[r] == hosts[me])
            assert bool((error == 0).all()) == (near or n <= 1024)
            assert bool((error <= bound(values(size * r + me, n), "mxfp8")).all())
        for r, part in enumerate(outs):
            found[r] = bool((part == values(size * r + me, 2000)).all())
        return found

    for me, found in enumerate(run(program, place)):
        for r, exact in found.items():
            assert exact == (r == me or (place[0] == "auto" and hosts[r] == hosts[me]))


@pytest.mark.parametrize("place", [("gloo", "ab"), ("auto", "aab"), ("shm", "aa")], ids=str)
def test_what_is_not_finite_stays_so(place):
    def program(comm):
        x = torch.ones(5000)
        x[17] = [float("inf"), 1.0, float("nan")][comm.get_rank()]
        comm.all_reduce(x, SUM, hints={"wire": "int8"})
        return bool(x[17].isnan()), int(x.isnan().sum())

    for nan, count in run(program, place):
        assert nan
        assert count <= 64


def test_the_hints_of_a_communicator_serve_what_they_can():
    """Other element types, reductions and operations travel as they are."""

    def program(comm):
        me = comm.get_rank()
        x = values(me)
        comm.all_reduce(x, SUM)
        whole = torch.full((COUNT,), me + 1)
        comm.all_reduce(whole, SUM)
        most, wide = values(me), values(me).double()
        comm.all_reduce(most, ReduceOp.MAX)
        comm.all_reduce(wide, SUM)
        same = values(0)
        comm.broadcast(same, 0)
        plain = values(me)
        comm.all_reduce(plain, SUM, hints={"wire": "plain"})
        child = comm.split(list(range(comm.get_size())), "child")
        y = values(me)
        child.all_reduce(y, SUM)
        child.finalize()
        assert bits(x) == bits(y)
        assert bits(same) == bits(values(0))
        assert whole.unique().tolist() == [3]
        assert torch.equal(most, torch.maximum(values(0), values(1)))
        assert torch.equal(wide, values(0).double() + values(1).double())
        assert torch.equal(plain, values(0) + values(1))
        return bool((x == plain).all())

    assert run(program, ("gloo", "ab"), wire="mxfp8") == [False] * 2
    assert run(program, ("auto", "ab"), wire="mxfp8") == [False] * 2
    assert run(program, ("shm", "aa"), wire="mxfp8") == [True] * 2  # nothing leaves the host


def test_the_environment_is_the_default(monkeypatch):
    def program(comm):
        x = values(comm.get_rank())
        comm.all_reduce(x, SUM)
        return bool((x == values(0) + values(1)).all())

    monkeypatch.setenv("UNICOMM_WIRE", "int8")
    assert run(program, ("gloo", "ab")) == [False] * 2
    assert run(program, ("gloo", "ab"), wire="plain") == [True] * 2


def test_what_has_no_wire_format_is_refused_before_it_begins():
    def program(comm):
        hints = {"wire": "mxfp8"}
        big = torch.ones(5000)
        refusals = [
            (lambda: comm.all_reduce(big.int(), SUM, hints=hints), "torch.int32 has no wire format"),
            (lambda: comm.all_reduce(big.double(), SUM, hints=hints), "torch.float64 has no wire format"),
            (lambda: comm.all_reduce(big, ReduceOp.MAX, hints=hints), "MAX has no wire format"),
            (lambda: comm.all_reduce(big, ReduceOp.PRODUCT, hints=hints), "PRODUCT has no wire format"),
            (lambda: comm.broadcast(big, 0, hints=hints), "no wire format for broadcast"),
            (lambda: comm.barrier(hints=hints), "no wire format for barrier"),
        ]
        for act, message in refusals:
            with pytest.raises(unicomm.UnsupportedError, match=message):
                act()
        both = {"wire": "mxfp8", "reduction": "reproducible"}
        with pytest.raises(unicomm.InvalidArgumentError, match="rounds what reduction=reproducible"):
            comm.all_reduce(big, SUM, hints=both)
        with pytest.raises(unicomm.InvalidArgumentError, match="expected one of plain, bfloat16"):
            comm.all_reduce(big, SUM, hints={"wire": "fp4"})
        for bad in ("up", "stochastic:x", "nearest:1"):
            with pytest.raises(unicomm.InvalidArgumentError, match="expected nearest, stochastic"):
                comm.all_reduce(big, SUM, hints={"wire": "int8", "wire_rounding": bad})
        with pytest.raises(unicomm.InvalidArgumentError, match="without a wire format"):
            comm.all_reduce(big, SUM, hints={"wire_rounding": "nearest"})
        with pytest.raises(unicomm.UnsupportedError, match="takes no hints"):
            comm.all_reduce(big, SUM, hints={"wire": "int8", "other": "1"})
        comm.all_reduce(big, SUM)
        return big[0].item(), inside.engine(comm).fast.seq

    assert run_ranks(program, 2, backend="gloo") == [(2.0, 1)] * 2


def test_reproducible_and_wire_exclude_each_other():
    both = {"wire": "mxfp8", "reduction": "reproducible"}
    with pytest.raises(unicomm.InvalidArgumentError, match="choose one of them"):
        unicomm.new_comm("gloo", torch.device("cpu"), name="both", hints=both, rank=0, size=1)

    def reproducible(comm):
        with pytest.raises(unicomm.UnsupportedError, match="its sums are exact"):
            comm.all_reduce(torch.ones(5000), SUM, hints={"wire": "int8"})

    def encoded(comm):
        with pytest.raises(unicomm.UnsupportedError, match="its sums are exact"):
            comm.all_reduce(torch.ones(5000), SUM, hints={"reduction": "reproducible"})

    run(reproducible, ("gloo", "ab"), reduction="reproducible")
    run(encoded, ("gloo", "ab"), wire="int8")


@pytest.mark.parametrize("place", [("shm", "aaa"), ("gloo", "abc"), ("auto", "aab")], ids=str)
def test_ranks_that_disagree_get_a_mismatch(place):
    def program(comm):
        for others in (None, {"wire": "int8"}):
            x = torch.ones(5000)
            hints = {"wire": "mxfp8"} if comm.get_rank() == 0 else others
            with pytest.raises(unicomm.MismatchError) as raised:
                comm.all_reduce(x, SUM, hints=hints)
            if place[0] != "shm":
                assert "wire=mxfp8" in str(raised.value)
            assert bool((x == 1).all())

    run(program, place)


@pytest.mark.parametrize("place", [("gloo", "abc"), ("auto", "aabb")], ids=str)
def test_stochastic_rounding_repeats_with_its_seed(place):
    def program(comm):
        found = []
        for rounding in ("stochastic:7", "stochastic:8", "nearest"):
            x = values(comm.get_rank())
            comm.all_reduce(x, SUM, hints={"wire": "mxfp8", "wire_rounding": rounding})
            found.append(bits(x))
        return found

    first, second = run(program, place), run(program, place)
    assert first == second
    assert all(found == first[0] for found in first)
    assert len(set(first[0])) == 3


@pytest.mark.parametrize("op", [SUM, AVG, ReduceOp.PREMUL_SUM(0.25)], ids=repr)
@pytest.mark.parametrize("fmt", ["int8", "mxfp8"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_residual_makes_up_for_what_is_lost(place, fmt, op):
    """The mean of many operations on the same input nears the exact result, which without it, it does not."""
    steps, size = 40, len(place[1])

    def program(comm):
        engine, me = inside.engine(comm), comm.get_rank()
        residual = torch.zeros(5000)
        with_it, without = torch.zeros(5000), torch.zeros(5000)
        for _ in range(steps):
            for into, lost in ((with_it, residual), (without, None)):
                x = values(me, 5000)
                engine.collective("all_reduce", (x,), False, {"wire": fmt}, None, op=op, residual=lost)
                into.add_(x / steps)
        rest, out = torch.zeros(size * 2000), torch.zeros(2000)
        scattered = torch.zeros(2000)
        for _ in range(steps):
            x = torch.cat([values(size * me + r, 2000) for r in range(size)])
            engine.collective(
                "reduce_scatter_single", (out, x), False, {"wire": fmt}, None, op=op, residual=rest
            )
            scattered += out / steps
        return with_it, without, scattered

    factor = {SUM: 1.0, AVG: 1 / size}.get(op, 0.25)
    everyone = run(program, place)
    exact = sum(values(r, 5000) for r in range(size)) * factor
    near, far = ((x - exact).abs().max().item() for x in everyone[0][:2])
    assert near < far / 8
    for me, (_, _, scattered) in enumerate(everyone):
        exact = sum(values(size * r + me, 2000) for r in range(size)) * factor
        assert (scattered - exact).abs().max().item() < far / 4


def test_logs_and_profiles_say_what_was_sent():
    log = io.StringIO()

    def program(comm):
        if comm.get_rank() == 0:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                clog = unicomm.hooks.clog(log, events=["ALL"])
                clog.register_with_comm(comm)
                comm.all_reduce(values(0, 64000), SUM, hints={"wire": "mxfp8"})
                clog.close()
        else:
            comm.all_reduce(values(1, 64000), SUM, hints={"wire": "mxfp8"})

    run_ranks(program, 2, backend="gloo")
    sent = 2 * (32000 + 1000)  # half of the elements on the way there, half on the way back
    assert re.search(r"sig\|all_reduce\|.*\|wire=mxfp8\|", log.getvalue())
    assert f"|wire_bytes={sent}\n" in log.getvalue()
    table = profiling.finished[-1].table
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    mine = [row for row in rows if table["groups"][row["group"]]["rank"] == 0]
    assert [(row["bytes"], row["wire"], row["wire_bytes"]) for row in mine] == [(256000, "mxfp8", sent)]


@pytest.mark.parametrize("place", [("gloo", "ab"), ("auto", "aab")], ids=str)
def test_records_have_the_bytes_that_were_sent(place):
    def program(comm):
        me = comm.get_rank()
        x = values(me, 64000)
        comm.all_reduce(x, SUM, async_op=me == 0, hints={"wire": "mxfp8"}).wait()
        comm.all_reduce(x, SUM)
        comm.barrier()
        index = inside.engine(comm).member.recorder_index
        ring = read_ring(writer.ring_bytes())
        first, second = ring.records[ring.records["comm"] == index][-3:-1]
        assert ring.sent(second) is None
        entries = to_dict(ring, comms=[index], last=3)["entries"]
        assert [e.get("unicomm_sent_bytes") for e in entries] == [ring.sent(first), None, None]
        out = io.StringIO()
        Console(file=out, width=300).print(render_raw([ring], Selection(last=3)))
        lines = [re.split(" *[│┃] *", line.strip()) for line in out.getvalue().splitlines()]
        assert lines[0][-2:] == ["bytes", "sent bytes"]
        row = next(line for line in lines if len(line) > 1 and line[1] == str(first["id"]))
        assert re.fullmatch(r"float32\[64000\] SUM( async)? in a wire format", row[6])
        assert row[-2:] == ["256000", str(ring.sent(first))]
        return ring.sent(first)

    both = 2 * (32000 + 1000)  # half of the elements on the way there, half on the way back
    # Of a host of two ranks beside one of one rank, only one sends.
    assert run(program, place) == ([both, both] if place[0] == "gloo" else [both, 0, both])


@pytest.mark.parametrize("sent", [0, (1 << 31) - 1, 1 << 31, (1 << 40) + 1, 1 << 50])
def test_records_of_many_bytes(sent, tmp_path):
    """In KiB from 2 GiB on, and at most 2 TiB."""
    recorder = _core.Recorder(str(tmp_path / "1.ucring"), "{}", 0, 1, 16)
    comm = recorder.add_comm("many", "gloo", "uid", "0", 0, 1)
    recorder.add_sent(recorder.begin(comm, 1, 1, 1, [], []), sent)
    ring = read_ring((tmp_path / "1.ucring").read_bytes())
    found = ring.sent(ring.records[0])
    assert found is not None
    assert found == sent if sent < 1 << 31 else sent <= found < sent + 1024 or found == ((1 << 31) - 1) << 10
