"""The exporter's process: clients that misbehave, addresses, and its end."""

import contextlib
import http.client
import socket
import sys
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.commands import run
from tests.flight_recorder.rings import write_ring
from unicomm.launch.exporter import server
from unicomm.launch.exporter.exporter_process import ExporterProcess, listen


@pytest.fixture
def serve(tmp_path, capsys, eventually):
    """`serve(host)`: an exporter that follows a folder with one ring; returns its address and port."""
    with contextlib.ExitStack() as ending:

        def start(host="127.0.0.1"):
            try:
                listening = listen(host, 0)
            except OSError as error:
                pytest.skip(f"nothing can listen at {host}: {error}")
            where = listening.getsockname()[:2]
            process = ExporterProcess(tmp_path / "log", listening)
            ending.callback(process.close)
            process.follow(tmp_path)
            assert str(where[1]) in capsys.readouterr().err
            eventually(lambda: scrape(where))  # it may be asked before it is told the folder
            return where

        kept = write_ring(tmp_path / "h-rank00000-0.ucring", 0, 1, 5)
        yield start
        del kept
    assert (tmp_path / "log").read_text() == ""


def scrape(where):
    host = f"[{where[0]}]" if ":" in where[0] else where[0]
    with urllib.request.urlopen(f"http://{host}:{where[1]}/metrics", timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {s.name: s.value for family in families for s in family.samples if s.labels.get("rank") == "0"}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_addresses(serve, host):
    assert scrape(serve(host))["unicomm_operations_total"] == 5


def test_clients_that_say_nothing_are_bounded(serve):
    """They take all connections; whoever comes then is sent away at once, and served when they are gone."""
    where = serve()
    silent = [socket.create_connection(where) for _ in range(server._MOST_AT_ONCE)]
    time.sleep(0.2)  # until each has its thread
    began = time.monotonic()
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        scrape(where)
    assert time.monotonic() - began < server._PATIENCE / 2
    for client in silent:
        client.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(http.client.RemoteDisconnected, ConnectionError):
            assert scrape(where)["unicomm_operations_total"] == 5
            return
    raise AssertionError("nobody was served any more")


def test_requests_that_are_none(serve):
    where = serve()
    for said in (b"", b"GET", b"\x00" * 1000, b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n"):
        with socket.create_connection(where) as client:
            client.sendall(said)
            if said:
                client.shutdown(socket.SHUT_WR)
                client.settimeout(20)
                with contextlib.suppress(ConnectionError):
                    while client.recv(4096):
                        pass
    assert scrape(where)["unicomm_operations_total"] == 5


def test_it_imports_no_torch():
    """Its memory, beside every launcher, is numpy's."""
    code = "import sys, unicomm.launch.exporter.server; print({'torch', 'zmq'} & set(sys.modules))"
    done = run([sys.executable, "-c", code])
    assert done.stdout == "set()\n", done.stderr
