"""The page of benchmarks, and the floors beside its figures."""

from __future__ import annotations

import json

import pytest

from benchmarks import floors, page
from benchmarks.cpu_collectives import OPERATIONS

FIGURES = {
    "flag": 0.5,
    "1024": {"copy": 0.1, "exchange": 1.0, "streamed": 1.0},
    "1048576": {"copy": 102.4, "exchange": 1.0, "streamed": 1.0},
}


def test_the_page_is_that_of_the_figures():
    assert page.PAGE.read_text() == page.page(json.loads(page.FIGURES.read_text())), (
        "python -m benchmarks.page writes it"
    )


def test_the_page_says_what_is_missing_and_compares():
    seconds = {"unicomm": 2e-6, "unicomm, its memory": 1e-6, "Gloo": 8e-6, "MPICH": 6e-6}
    row = {"operation": "all_reduce", "dtype": "bfloat16", "bytes": 8, "size": "8 B", "ranks": 4}
    about = {"machine": "a machine", "load": [0.5, 2.0, 1.0], "date": "2026-01-01", "torch": "2.13.0"}
    figures = {
        "about": about,
        "floor": FIGURES,
        "rows": [{**row, "seconds": seconds, "best_peer_over_unicomm": 3.0, "floor": 1e-6}],
        "waiting": {"4": {"unicomm": 0.004}},
    }
    text = page.page(figures)
    assert "Not in this run: Open MPI, Intel MPI." in text
    assert "load average 0.5 to 2" in text
    assert "## 4 ranks" in text
    assert "| all_reduce, bfloat16 | 8 B | 2.0 | 1.0 | 8.0 | 6.0 | 3.00 | 2.0 |" in text
    assert "in milliseconds: unicomm 4.0." in text


@pytest.mark.parametrize(
    ("operation", "one", "total"),
    [
        ("all_reduce", 1.375, 5.5),  # of 4 ranks: reads 4/4, writes 1/4, reads and writes 3/4
        ("all_gather", 4, 16),
        ("reduce_scatter", 2.5, 10),  # reads 4, writes 1
        ("all_to_all", 4, 16),
        ("broadcast", 1, 3),
        ("barrier", 0, 0),
        ("ping_pong", 2, 4),
    ],
)
def test_what_four_ranks_move(operation, one, total):
    assert floors.moved(operation, 1000, 4) == (one * 1000, total * 1000)


def test_every_operation_has_a_floor_that_grows():
    for operation in OPERATIONS:
        least = [floors.floor(operation, n, 4, 2, FIGURES) for n in (8, 1 << 10, 1 << 20, 1 << 27)]
        assert least[0] >= floors.rounds(operation, 4) * 0.5e-6
        assert least == sorted(least)
        assert floors.floor(operation, 1 << 20, 8, 2, FIGURES) >= least[2]


def test_copies_between_the_measured_sizes():
    assert floors.copying(512, FIGURES) == pytest.approx(0.05)
    assert floors.copying(1 << 15, FIGURES) == pytest.approx(0.1 * 32, rel=1e-6)
    assert floors.copying(1 << 21, FIGURES) == pytest.approx(204.8)
