"""A host's link goes down while a communicator of ranks of that host is made: they need no network."""

import subprocess
import sys

import pytest

from tests.commands import clean_environment
from tests.ucx_here import needs_ucx
from tools import namespaces

pytestmark = [
    pytest.mark.processes,
    needs_ucx,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=f"no network namespaces: {namespaces.why_not()}"),
    pytest.mark.timeout(240),
]
# The link goes down at another moment each time, some of them between UCX's list of devices and their use.
PROGRAM = """
import subprocess, threading, time, unicomm
def link(way, after=0.0):
    time.sleep(after)
    subprocess.run(["ip", "link", "set", "eth0", way], check=True)
def alone():
    unicomm.new_comm("ucx", "cpu", name="alone", rank=0, size=1).finalize()
alone()
for i in range(48):
    cut = threading.Thread(target=link, args=("down", max(0, i - 24) * 0.0004))
    cut.start()
    time.sleep(max(0, 24 - i) * 0.0004)
    alone()
    cut.join()
    link("up")
print("made")
"""


def test_a_rank_alone_needs_no_link():
    with namespaces.Namespaces(2) as hosts:
        command = [*hosts.enter(0), sys.executable, "-c", PROGRAM]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=200, env=clean_environment(), check=False
        )
    assert ended.stdout.endswith("made\n"), ended.stderr  # after what UCX says of its devices
