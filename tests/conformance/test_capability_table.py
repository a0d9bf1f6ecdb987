"""The table in docs/capabilities.md is what the conformance suite says today."""

from tests import ROOT
from tools import capability_table


def test_the_page_is_up_to_date():
    page = (ROOT / capability_table.PAGE).read_text()
    table = capability_table.table()
    assert "| - |" not in table
    assert capability_table.renewed(page, table) == page, "run `make docs`"
