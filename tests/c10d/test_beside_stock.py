"""Programs whose ranks get with the switch what they get on stock Gloo."""

import pytest

from tests.c10d.beside_stock import same_results

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def test_both_forms_of_methods(forked_programs, tmp_path):
    assert len(same_results(forked_programs, tmp_path, "forms.py")) > 15


def test_layouts(forked_programs, tmp_path):
    assert len(same_results(forked_programs, tmp_path, "layouts.py")) == 20


def test_what_modes_and_subclasses_see(forked_programs, tmp_path):
    results = same_results(forked_programs, tmp_path, "observed.py")
    assert ["c10d.allreduce_", 2] in results[1]
    assert "c10d.allreduce_.default" in results[2]
    assert results[5] == [6.0] * 4


def test_messages_with_tags(forked_programs, tmp_path):
    assert len(same_results(forked_programs, tmp_path, "tags.py", ranks=3)) == 4


@pytest.mark.timeout(400)
def test_compiled_programs(forked_programs, tmp_path):
    results = same_results(forked_programs, tmp_path, "compiled.py", ["auto"])
    assert results[-2] == ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
    assert results[-1] == [10.0] * 4
