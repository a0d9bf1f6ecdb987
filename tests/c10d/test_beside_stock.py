"""Programs whose ranks get with the switch what they get on stock Gloo."""

import pytest

from tests.c10d.beside_stock import same_results

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_both_forms_of_methods(tmp_path, backend):
    assert len(same_results(tmp_path, "forms.py", backend)) > 15


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_layouts(tmp_path, backend):
    assert len(same_results(tmp_path, "layouts.py", backend)) == 20


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_modes_and_subclasses_see(tmp_path, backend):
    results = same_results(tmp_path, "observed.py", backend)
    assert ["c10d.allreduce_", 2] in results[1]
    assert "c10d.allreduce_.default" in results[2]
    assert results[5] == [6.0] * 4


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_messages_with_tags(tmp_path, backend):
    assert len(same_results(tmp_path, "tags.py", backend, ranks=3)) == 4


@pytest.mark.timeout(400)
def test_compiled_programs(tmp_path):
    results = same_results(tmp_path, "compiled.py", "auto")
    assert results[-2] == ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
    assert results[-1] == [10.0] * 4
