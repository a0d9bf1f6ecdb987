"""SECURITY.md says what listens where: each row of its table is what jobs of today do."""

import pytest

from tests.security import doors_page
from tests.security.doors_page import PAGE, WAYS, Missing, doors, renewed, rows, written
from tools import namespaces

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(namespaces.why_not()), reason=f"no namespaces: {namespaces.why_not()}"),
]


def test_the_table_has_all_ways():
    page = PAGE.read_text()
    assert list(written(page)) == list(WAYS), "make docs"
    assert renewed(page, written(page)) == page, "make docs"


@pytest.mark.parametrize("way", WAYS)
def test_what_listens_is_what_the_table_says(way):
    try:
        found = doors(way)
    except Missing as error:
        pytest.skip(str(error))
    assert rows(way, found) == written(PAGE.read_text())[way], "look what listens there now; then make docs"


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("`unicomm run`")])
def test_launchers_of_ours_listen_nowhere_for_everybody(way):
    """A rule for the table, which `make docs` cannot change."""
    lines = written(PAGE.read_text())[way]
    assert lines
    assert not any("all addresses" in line for line in lines)
    assert not any("torch's store" in line and line.endswith("| yes |") for line in lines) or "static" in way
    if "one host" in way:
        assert all("| loopback |" in line and line.endswith("| no |") for line in lines)


def test_counts_are_of_all_hosts_together():
    door = doors_page.Door("rank", "torch's store", 2, "loopback", "nothing", "no")
    assert rows("a way", [door]) == ["| a way | rank | torch's store | 2 | loopback | nothing | no |"]
    assert rows("another", []) == ["| another | no process listens | | 0 | | | |"]
