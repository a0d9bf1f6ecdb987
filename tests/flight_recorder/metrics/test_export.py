"""`unicomm trace export`: the command on real rings and dumps, its formats read by their own libraries."""

import json
import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from tests import ROOT
from tests.commands import clean_environment, run
from tests.flight_recorder.rings import write_ring
from unicomm.flight_recorder.metrics.catalogue import METRICS, Kind

PAGE = ROOT / "docs/trace/metrics.md"
OPERATIONS = "unicomm_operations_total"


def export(*words, **variables):
    return run(
        [sys.executable, "-m", "unicomm", "trace", "export", *words], env=clean_environment() | variables
    )


def by_name(families):
    """Sample name -> labels -> value."""
    found = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def points(message):
    """Metric name -> its data points, of the only resource and scope."""
    [resource] = message.resource_metrics
    [scope] = resource.scope_metrics
    assert scope.scope.name == "unicomm"
    return {m.name: list((m.sum if m.HasField("sum") else m.gauge).data_points) for m in scope.metrics}


def attributes(owner):
    return {pair.key: pair.value.string_value for pair in owner.attributes}


@pytest.fixture
def folder(tmp_path):
    """Two ranks; rank 0 is in its fifth operation."""
    rings = tmp_path / "rings"
    rings.mkdir()
    kept = [write_ring(rings / f"h-rank0000{r}-{r}.ucring", r, 2, 5 - r, unfinished=r == 0) for r in (0, 1)]
    yield rings
    del kept


@pytest.fixture
def collector():
    """A collector; `answers` are what it replies, `got` what it was sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.got.append((self.path, dict(self.headers), body))
            if server.silent.wait(0 if server.status else 30):
                return
            data = server.page or server.answer.SerializeToString()
            self.send_response(server.status or 200)
            self.send_header("Content-Type", server.kind)
            if server.location:
                self.send_header("Location", server.location)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            server.got.append(("GET " + self.path, {}, b""))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.got, server.status, server.answer = [], 200, ExportMetricsServiceResponse()
    server.page, server.kind, server.location = b"", "application/x-protobuf", ""
    server.silent = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.silent.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_openmetrics_is_what_its_parser_reads(folder):
    done = export(folder)
    assert done.returncode == 0, done.stderr
    found = by_name(openmetrics(done.stdout))
    labels = {"communicator": "main", "operation": "all_reduce"}
    assert found[OPERATIONS] == {
        frozenset((labels | {"rank": "0"}).items()): 4,
        frozenset((labels | {"rank": "1"}).items()): 4,
    }
    assert done.stdout.endswith("# EOF\n")
    assert found["unicomm_rank_operation_number"] == {frozenset((labels | {"rank": "0"}).items()): 5}
    known = {metric.sample for metric in METRICS}
    assert set(found) <= known
    kinds = {family.name: (family.type, family.unit) for family in openmetrics(done.stdout)}
    for metric in METRICS:
        if metric.family in kinds:
            assert kinds[metric.family] == (metric.kind.value, metric.prometheus_unit)


def test_the_older_format_for_textfile_collectors(folder, tmp_path):
    file = tmp_path / "unicomm.prom"
    done = export(folder, "--openmetrics", file)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    found = by_name(prometheus(file.read_text()))
    assert sum(found[OPERATIONS].values()) == 8
    assert "# TYPE unicomm_operations_total counter" in file.read_text()
    assert "info\n" not in file.read_text()  # a type that this format does not know
    assert list(tmp_path.glob(".unicomm*")) == []


@pytest.mark.parametrize("suffix", ["json", "pb"])
def test_otlp_is_read_back(folder, tmp_path, suffix):
    file = tmp_path / f"metrics.{suffix}"
    done = export(
        folder, "--otlp", file, OTEL_SERVICE_NAME="training", OTEL_RESOURCE_ATTRIBUTES="slurm.job=17,x=a%20b"
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    data = file.read_bytes()
    if suffix == "json":
        assert data.count(b"\n") == 1
        message = Parse(data, ExportMetricsServiceRequest())
        [scope] = json.loads(data)["resourceMetrics"][0]["scopeMetrics"]
        sums = [metric["sum"] for metric in scope["metrics"] if "sum" in metric]
        assert {one["aggregationTemporality"] for one in sums} == {2}  # a number, as OTLP/JSON demands
    else:
        message = ExportMetricsServiceRequest.FromString(data)
    about = attributes(message.resource_metrics[0].resource)
    assert about == {"service.name": "training", "slurm.job": "17", "x": "a b", "host.name": "here"}
    found = points(message)
    known = {metric.name: metric for metric in METRICS}
    for metric in message.resource_metrics[0].scope_metrics[0].metrics:
        one = known[metric.name]
        assert (metric.unit, metric.description) == (one.unit, one.text)
        assert metric.sum.is_monotonic == (one.kind is Kind.COUNTER)
        for point in found[metric.name]:
            assert set(attributes(point)) == set(one.labels)
            assert 0 < point.start_time_unix_nano <= point.time_unix_nano or one.kind is not Kind.COUNTER
    assert [point.as_int for point in found["unicomm.operations"]] == [4, 4]
    assert all(point.as_double > 0 for point in found["unicomm.operation.time"])
    # The same numbers as in the other format.
    text = by_name(openmetrics(export(folder).stdout))
    assert sum(text[OPERATIONS].values()) == 8


def test_dumps_of_torch(tmp_path):
    """torch's own Gloo group, with its own recorder, in this process."""
    program = """
import os, pickle, sys, time, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/store", rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
def dump():
    return _dump_fr_trace(True, False, False)
while pickle.loads(dump())["pg_status"]["0"]["last_completed_collective"] < 3:
    time.sleep(0.01)  # another thread tells the recorder
with open(sys.argv[1] + "/dump_rank_0", "wb") as file:
    file.write(dump())
os._exit(0)  # torch's own Gloo may abort at the end of Python (pytorch/pytorch#179291)
"""
    environment = clean_environment() | {
        "TORCH_FR_BUFFER_SIZE": "100",
        "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "0",
    }
    run([sys.executable, "-c", program, tmp_path], env=environment, check=True)
    done = export(tmp_path / "dump_rank_0")
    assert done.returncode == 0, done.stderr
    found = by_name(openmetrics(done.stdout))
    [(labels, count)] = found[OPERATIONS].items()
    assert (dict(labels)["communicator"], dict(labels)["operation"], count) == ("default", "all_reduce", 3)
    [(_, size)] = found["unicomm_operation_io_bytes_total"].items()
    assert size == 3 * 4 * 4


def test_sent_to_a_collector(folder, collector):
    done = export(folder, "--otlp", collector.url, OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20x")
    assert done.returncode == 0, done.stderr
    [(path, headers, body)] = collector.got
    assert path == "/v1/metrics"
    assert headers["Content-Type"] == "application/x-protobuf"
    assert headers["Authorization"] == "Bearer x"
    assert "unicomm.rank.state" in points(ExportMetricsServiceRequest.FromString(body))


def test_a_path_of_the_url_is_kept(folder, collector):
    assert export(folder, "--otlp", collector.url + "/otlp/v1/metrics").returncode == 0
    assert collector.got[0][0] == "/otlp/v1/metrics"


def test_a_collector_that_refuses(folder, collector):
    collector.status = 503
    done = export(folder, "--otlp", collector.url)
    assert done.returncode == 2
    assert f"{collector.url}/v1/metrics answered 503" in done.stderr
    collector.status, collector.answer.partial_success.rejected_data_points = 200, 7
    collector.answer.partial_success.error_message = "too old"
    done = export(folder, "--otlp", collector.url)
    assert done.returncode == 2
    assert "rejected 7 data points: too old" in done.stderr


def test_what_is_no_collector_is_not_sent_to(folder, collector):
    collector.status, collector.location = 302, "/login"
    done = export(folder, "--otlp", collector.url)
    assert done.returncode == 2
    assert "answered 302 Found, a redirection to /login" in done.stderr
    assert [path for path, _, _ in collector.got] == ["/v1/metrics"]
    collector.status, collector.location, collector.page = 200, "", b"<html>it works</html>"
    for kind, said in (
        ("text/html", "answered with text/html: it is no collector"),
        ("application/x-protobuf", "gave an answer that no collector gives"),
        ("application/json", "gave an answer that no collector gives"),
    ):
        collector.kind = kind
        done = export(folder, "--otlp", collector.url)
        assert done.returncode == 2, kind
        assert said in done.stderr
    collector.page = b'{"partialSuccess": {"rejectedDataPoints": "3", "errorMessage": "old"}, "more": 1}'
    done = export(folder, "--otlp", collector.url)
    assert done.returncode == 2
    assert "rejected 3 data points: old" in done.stderr


def test_a_port_that_speaks_something_else(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"\0\0\x06\x04\0\0\0\0\0\0\x05\0\0\x40\0\r\n")  # settings of HTTP/2
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(1 << 16):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        done = export(folder, "--otlp", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert done.returncode == 2
    assert "is it the port of gRPC?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "url", ["http://localhost:abc", "http://[::1", "http://local host/a b", "http://:4318"]
)
def test_urls_that_name_no_collector(folder, url):
    done = export(folder, "--otlp", url)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "http://" in done.stderr


def test_a_collector_that_does_not_answer(folder, collector):
    collector.status = 0
    done = export(folder, "--otlp", collector.url, "--timeout", "0.5")
    assert done.returncode == 2
    assert "cannot be reached: timed out" in done.stderr
    assert "Traceback" not in done.stderr
    with_nobody = export(folder, "--otlp", "http://127.0.0.1:1")
    assert with_nobody.returncode == 2
    assert "http://127.0.0.1:1/v1/metrics cannot be reached" in with_nobody.stderr


def test_what_cannot_be_done_is_said(folder, tmp_path):
    for words, said in (
        ((folder, "--openmetrics", "-", "--otlp", "-"), "would mix on stdout"),
        ((tmp_path / "nothing",), "no such file or folder"),
        ((folder, "--otlp", tmp_path / "no/folder.json"), "No such file or directory"),
    ):
        done = export(*words)
        assert done.returncode == 2, done.stdout
        assert said in done.stderr
        assert "Traceback" not in done.stderr


# --- the documentation, and files for other programs ---------------------------------------------------


def row(metric):
    """A metric's line in the page."""
    name, unit = metric.name.removeprefix("unicomm."), metric.unit.strip("{}")
    cells = (
        f"`{metric.sample}`",
        f"`{name}`",
        metric.kind.value,
        unit,
        ", ".join(metric.labels),
        metric.text,
    )
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def test_the_page_lists_exactly_these_metrics():
    rows = [row(metric) for metric in METRICS]
    listed = [line for line in PAGE.read_text().splitlines() if line.startswith("| `unicomm_")]
    assert listed == rows


def queried(text):
    return set(re.findall(r"\bunicomm_\w+", text))


def test_the_dashboard_asks_for_metrics_that_exist():
    board = json.loads((ROOT / "examples/grafana-dashboard.json").read_text())
    known = {metric.sample: metric for metric in METRICS}
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions += [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    assert len(panels) >= 15
    used = set()
    for expression in expressions:
        assert queried(expression)
        assert queried(expression) <= set(known), expression
        used |= queried(expression)
        for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            labels = {label for name in queried(expression) for label in known[name].labels}
            assert {word.strip() for word in grouped.split(",")} <= labels | {"instance"}, expression
    assert used == set(known)  # the dashboard shows all there is
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_alerts_ask_for_metrics_that_exist():
    rules = (ROOT / "examples/prometheus-alerts.yml").read_text()
    expressions = re.findall(r"^\s+expr: (.*)$", rules, re.MULTILINE)
    assert len(expressions) == rules.count("- alert:") >= 5
    for expression in expressions:
        assert queried(expression)
        assert queried(expression) <= {metric.sample for metric in METRICS}, expression


def test_a_number_that_otlp_has_no_integer_for():
    """A damaged ring may have any."""
    from unicomm.flight_recorder.metrics.otlp import request
    from unicomm.flight_recorder.metrics.samples import Samples

    counted = next(metric for metric in METRICS if metric.unit not in ("s", "1"))
    labels = ("x",) * len(counted.labels)
    taken = Samples([(counted, labels, 2**64 - 1), (counted, labels, 2**63 - 1)], taken_ns=1)
    [metric] = request(taken).resource_metrics[0].scope_metrics[0].metrics
    points = (metric.sum if counted.kind is Kind.COUNTER else metric.gauge).data_points
    assert [point.as_double or point.as_int for point in points] == [2.0**64, 2**63 - 1]
