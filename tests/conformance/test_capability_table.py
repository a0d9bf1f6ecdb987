"""The table in docs/capabilities.md is what the conformance suite and the backends say today.

Other tests run the suite on each backend of the table: those of this folder, of backends/hosts and of
backends/mpi. So the first test does not run it again.
"""

from tests import ROOT
from tools import capability_table
from unicomm.testing import conformance


def test_the_page_is_up_to_date():
    page = (ROOT / capability_table.PAGE).read_text()
    table = capability_table.table(lambda column, name: True)
    assert "| - |" not in table
    assert capability_table.renewed(page, table) == page, "run `make docs`"


def test_what_does_not_pass_is_a_dash():
    table = capability_table.table(lambda column, name: (column, name) != ("gloo", "broadcast"))
    dashes = [line for line in table.splitlines() if "| - |" in line]
    assert len(dashes) == 1
    assert dashes[0].startswith("| `broadcast` |")


def test_the_suite_says_what_passes(monkeypatch, capsys):
    name = next(iter(conformance.OPTIONS))
    assert capability_table.passes("shm", "barrier")
    assert capability_table.passes("shm", name)

    def fail(*_):
        raise conformance.ConformanceError("the data are wrong")

    monkeypatch.setattr(conformance, "check", fail)
    monkeypatch.setattr(conformance, "check_option", fail)
    assert not capability_table.passes("shm", "barrier")
    assert not capability_table.passes("shm", name)
    assert "shm barrier: " in capsys.readouterr().err
