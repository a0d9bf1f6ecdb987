"""stderr whose reader is slow, or gone."""

import os
import sys
import threading

from unicomm.launch.run import lasting_stderr as lasting_stderr_module
from unicomm.launch.run.lasting_stderr import lasting_stderr

TEXT = "a line of the verdict\n" * 10_000  # more than a pipe holds


def writes(monkeypatch, descriptor):
    """Writes TEXT to stderr, which is `descriptor`; returns whether that became /dev/null."""
    stream = open(descriptor, "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", stream)
    with lasting_stderr():
        sys.stderr.write(TEXT)
    gone = os.readlink(f"/proc/self/fd/{descriptor}") == os.devnull
    stream.close()
    return gone


def test_a_slow_reader_gets_all(monkeypatch):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    got = []
    thread = threading.Thread(target=lambda: got.append(open(reader).read()))  # noqa: SIM115
    thread.start()
    assert not writes(monkeypatch, writer)
    thread.join()
    assert got == [TEXT]


def test_a_reader_that_is_stuck(monkeypatch):
    """It is waited for once, however much there is to say."""
    monkeypatch.setattr(lasting_stderr_module, "_PATIENCE", 0.2)
    waits, select = [], lasting_stderr_module.select.select
    monkeypatch.setattr(lasting_stderr_module.select, "select", lambda *a: waits.append(a[3]) or select(*a))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    assert writes(monkeypatch, writer)
    assert sum(waits) < 1.0
    os.close(reader)


def test_a_reader_that_has_gone(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    assert writes(monkeypatch, writer)
