"""Names of groups in reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicomm.flight_recorder.texts import tell_apart


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([("a", [0, 1], "shm"), ("b", [0, 1], "shm")], ["a", "b"]),
        ([("tp", [0, 1], "shm"), ("tp", [2, 3], "shm")], ["tp (ranks 0-1)", "tp (ranks 2-3)"]),
        (
            [("tp", [0], "shm"), ("tp", [0, 2], "shm"), ("x", [0], "shm")],
            ["tp (ranks 0)", "tp (ranks 0,2)", "x"],
        ),
        ([("main", [0, 1], "shm"), ("main", [0, 1], "nccl")], ["main (shm)", "main (nccl)"]),
        ([("main", [0, 1], "shm")] * 3, ["main", "main #2", "main #3"]),
        (
            [("tp", [0, 1], "shm"), ("tp", [0, 1], "shm"), ("tp", [2, 3], "shm")],
            ["tp (ranks 0-1)", "tp (ranks 0-1) #2", "tp (ranks 2-3)"],
        ),
        ([("a #2", [0], ""), ("a", [0], ""), ("a", [0], "")], ["a #2", "a", "a #3"]),
        ([], []),
    ],
)
def test_groups_of_one_name_get_what_tells_them_apart(groups, names):
    assert tell_apart(groups) == names


GROUPS = st.tuples(
    st.sampled_from(["a", "a #2", "a (ranks 0-1)", "a (shm)", "b"]),
    st.sampled_from([[0, 1], [2, 3], [], list(range(0, 4096, 7)), list(range(0, 4099, 7))]),
    st.sampled_from(["shm", "gloo"]),
)


@given(st.lists(GROUPS, max_size=12))
def test_no_two_names_are_equal(groups):
    names = tell_apart(groups)
    assert len(set(names)) == len(names) == len(groups)
    assert all(text.startswith(name) for (name, _, _), text in zip(groups, names, strict=True))
