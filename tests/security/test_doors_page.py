"""SECURITY.md says what listens where: each row of its table is what jobs of today do."""

import pytest

from tests.security import doors_page, listeners
from tests.security.doors_page import PAGE, WAYS, Missing, doors, renewed, rows, written
from tools import namespaces


@pytest.fixture(scope="module")
def hosts():
    """The rules for the table need no namespaces, and no root; looking at jobs does."""
    if why := namespaces.why_not():
        pytest.skip(f"no namespaces: {why}")


def test_the_table_has_all_ways():
    page = PAGE.read_text()
    assert list(written(page)) == list(WAYS), "make docs"
    assert renewed(page, written(page)) == page, "make docs"


def test_the_table_knows_who_made_each_socket():
    for lines in written(PAGE.read_text()).values():
        assert not any("unknown: made by" in line or listeners.NOT_SEEN in line for line in lines), lines


@pytest.mark.parametrize("way", [way for way in WAYS if "two hosts" in way])
def test_ranks_of_several_hosts_are_seen_while_they_connect(way):
    """And what they listen at then asks for a secret."""
    [line] = [line for line in written(PAGE.read_text())[way] if listeners.OF_RANKS in line]
    assert "| one address | a secret of the ranks |" in line


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("hosts")
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
