"""`unicomm run --metrics-port`: real ranks, scraped while they run, stop and die."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from tests.commands import clean_environment
from tests.processes.forked_interpreters import run
from tests.processes.rank_processes import PROGRAMS

pytestmark = pytest.mark.processes

WITHIN = 100.0  # a hang, not a slow machine
FAULTS = PROGRAMS / "torch_faults.py"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def launch(start):
    """`launch(...)`: `unicomm run --metrics-port=0 --nproc-per-node=2 ...`; ends with the test."""
    started = []

    def make(*arguments):
        options = ("--metrics-port=0", "--no-hub", "--nproc-per-node=2")
        started.append(start("unicomm_run_forking.py", None, *options, *arguments, environments=[{}])[0])
        return started[-1]

    yield make
    for process in started:
        if process.exit_code is None:
            process.signal(signal.SIGTERM)
            process.end(WITHIN)


def url_of(process, eventually):
    pattern = r"^unicomm: metrics of the ranks of this host: (http://\S+)$"
    eventually(lambda: re.search(pattern, process.complaints, re.MULTILINE), WITHIN)
    return re.search(pattern, process.complaints, re.MULTILINE).group(1)


def scrape(url, accept=OPENMETRICS):
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200
        kind, text = answer.headers["Content-Type"], answer.read().decode()
    parse = openmetrics if kind.startswith("application/openmetrics-text") else prometheus
    return [(s.name, s.labels, s.value) for family in parse(text) for s in family.samples]


def states(samples):
    found = [labels for name, labels, value in samples if name == "unicomm_rank_state" and value]
    return {labels["rank"]: labels["state"] for labels in found}


def values(samples, name, *labels):
    return {tuple(found[label] for label in labels): value for one, found, value in samples if one == name}


def hung(launch, tmp_path, eventually):
    """A job of which rank 1 waits outside of the communicator: launcher, URL, pid of rank 1."""
    file = tmp_path / "pid"
    process = launch(FAULTS, "waits", 1, file)
    url = url_of(process, eventually)
    eventually(file.exists, WITHIN)
    return process, url, int(file.read_text())


def exporters(launcher):
    """The exporters that a process has started."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{launcher}/task"):
            with open(f"/proc/{launcher}/task/{task}/children") as children:
                for pid in children.read().split():
                    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as line:
                        if "unicomm.launch.exporter.server" in line.read():
                            found.append(int(pid))
    return found


def test_a_job_that_hangs(launch, tmp_path, eventually):
    _, url, pid = hung(launch, tmp_path, eventually)
    assert url.startswith("http://127.0.0.1:")
    eventually(lambda: states(scrape(url)) == {"0": "waiting", "1": "running"}, WITHIN)
    found = scrape(url)
    assert values(found, "unicomm_operations_total", "rank", "communicator", "operation") == {
        ("0", "default", "all_reduce"): 3,
        ("1", "default", "all_reduce"): 3,
    }
    assert values(found, "unicomm_operation_io_bytes_total", "rank") == {("0",): 120, ("1",): 120}
    assert values(found, "unicomm_rank_operation_number", "rank", "operation") == {("0", "all_reduce"): 4}
    [since] = values(found, "unicomm_rank_operation_start_time_seconds", "rank").values()
    assert time.time() - 60 < since < time.time()

    def blamed():
        now = scrape(url)
        culprits = values(now, "unicomm_verdict_culprit", "rank", "verdict")
        where = values(now, "unicomm_verdict_info", "communicator", "operation")
        return set(culprits) == {("1", "blocked-outside-the-communicator")} and set(where) == {
            ("default", "all_reduce")
        }

    eventually(blamed, WITHIN)
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: states(scrape(url))["1"] == "stopped", WITHIN)
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: states(scrape(url))["1"] == "running", WITHIN)
    # The older format, for scrapers that ask for no other.
    assert values(scrape(url, "text/plain"), "unicomm_operations_total", "rank") == {("0",): 3, ("1",): 3}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(url.replace("/metrics", "/etc/passwd"))


def test_it_ends_with_the_job(launch, tmp_path, eventually):
    process, url, _ = hung(launch, tmp_path, eventually)
    [exporter] = exporters(process.pid)
    process.signal(signal.SIGTERM)
    assert process.end(WITHIN) == 128 + signal.SIGTERM
    assert not os.path.exists(f"/proc/{exporter}")
    with pytest.raises(urllib.error.URLError):
        scrape(url)


def test_it_ends_with_a_launcher_that_is_killed(launch, tmp_path, eventually):
    process, url, pid = hung(launch, tmp_path, eventually)
    [exporter] = exporters(process.pid)
    scrape(url)  # it has begun: from then on it ends with the launcher
    os.kill(exporter, signal.SIGSTOP)  # not even then it stays
    process.signal(signal.SIGKILL)
    assert process.end(WITHIN) == -signal.SIGKILL
    eventually(lambda: not os.path.exists(f"/proc/{exporter}"), WITHIN)
    with contextlib.suppress(ProcessLookupError):  # torchrun's ranks end with it
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_job_goes_on_without_it(launch, tmp_path, eventually, number):
    process, _, pid = hung(launch, tmp_path, eventually)
    [exporter] = exporters(process.pid)
    os.kill(exporter, number)
    os.kill(pid, signal.SIGKILL)
    assert process.end(WITHIN) == 128 + signal.SIGKILL
    assert "Rank 1 was killed" in process.complaints
    assert not os.path.exists(f"/proc/{exporter}")


def test_counters_grow_over_a_restart(launch, tmp_path, eventually):
    """Rank 0 raises in the first attempt; the second one waits to be read."""
    program = tmp_path / "twice.py"
    program.write_text(
        """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(5):
    dist.all_reduce(torch.ones(3))
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 0:
        raise ValueError("the first time only")
signal.pause()
"""
    )
    process = launch("--max-restarts=1", program)
    url = url_of(process, eventually)

    def total():
        found = values(scrape(url), "unicomm_operations_total", "rank", "operation")
        return [found.get((rank, "all_reduce")) for rank in "01"]

    eventually(lambda: total() == [10, 10], WITHIN)
    assert set(states(scrape(url)).values()) == {"running"}


def command(*words):
    return run([sys.executable, "-m", "unicomm", "run", *words], env=clean_environment())


def test_a_port_that_is_taken(tmp_path):
    """It is said before there are ranks."""
    program = tmp_path / "program.py"
    program.write_text("print('a rank has run')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = command(f"--metrics-port={port}", program)
    assert done.returncode == 2
    assert f"--metrics-port: cannot listen at 127.0.0.1, port {port}: Address already in use" in done.stderr
    assert "a rank has run" not in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--metrics-port=70000"], "--metrics-port 70000 is not a port"),
        (["--metrics-host=0.0.0.0"], "--metrics-host needs --metrics-port"),
        (["--metrics-port=0", "--metrics-host=192.0.2.1"], "cannot listen at 192.0.2.1, port 0"),
    ],
)
def test_options_that_cannot_be(options, said):
    done = command(*options, "program.py")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_other_addresses_only_if_asked_for(launch, tmp_path, eventually):
    """127.0.0.2 stands for them: a socket at 127.0.0.1 does not hear it, one at all addresses does."""
    _, url, _ = hung(launch, tmp_path, eventually)
    other = url.replace("127.0.0.1", "127.0.0.2")
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(other)
    process = launch("--metrics-host=0.0.0.0", FAULTS, "waits", 1, tmp_path / "other")
    url = url_of(process, eventually)
    assert url.startswith("http://0.0.0.0:")
    eventually(lambda: states(scrape(url.replace("0.0.0.0", "127.0.0.2"))), WITHIN)
