"""The table in the README is what the conformance suite says today."""

from tests import ROOT
from tools import capability_table


def test_readme_is_up_to_date():
    readme = (ROOT / "README.md").read_text()
    table = capability_table.table()
    assert "| - |" not in table
    assert capability_table.renewed(readme, table) == readme, "run `make docs`"
