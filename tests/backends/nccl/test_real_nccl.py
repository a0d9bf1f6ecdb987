"""The real libnccl, where it is installed (`pip install nvidia-nccl-cu13`): it needs no GPU to be opened."""

import pytest

from unicomm import _core
from unicomm.backends.nccl.library import NCCL, Library, version_text
from unicomm.backends.nccl.result_codes import error_of
from unicomm.comms.errors import UnsupportedError


@pytest.fixture(scope="module")
def nccl() -> Library:
    try:
        return Library(NCCL, NCCL.find(_core.NcclLibrary))
    except UnsupportedError as error:
        pytest.skip(str(error))


def test_its_log_is_kept_without_any_setting(nccl: Library) -> None:
    import os

    if any(name in os.environ for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE")):
        pytest.skip("the log is somebody else's")
    began = nccl.start_log()
    if nccl._log is None:
        pytest.skip("the library was used before")
    nccl.native.count(0)
    assert not any(name in os.environ for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"))
    assert nccl.last_error(since=began) == ("", [])  # what opened the log is no news
    result, _ = nccl.native.user_rank(0)
    words, lines = nccl.last_error(since=began)
    assert result == 4
    assert "argument is NULL" in words
    assert len(lines) == 1
    assert lines[0].endswith(words)


def test_all_functions_of_its_version_are_there(nccl: Library) -> None:
    for name, since, there in nccl.native.functions():
        assert there == (since <= nccl.version), f"nccl{name} since {version_text(since)}"


def test_its_words_become_errors(nccl: Library) -> None:
    words = [nccl.native.error_string(code) for code in range(9)]
    assert all(words)
    assert len(set(words)) == 9


def test_unique_ids_differ(nccl: Library) -> None:
    (first, one), (second, two) = nccl.native.unique_id(), nccl.native.unique_id()
    assert (first, second) == (0, 0)
    assert len(one) == len(two) == 128
    assert one != two


def test_without_a_gpu_creation_says_what_is_missing(nccl: Library) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    _, uid = nccl.native.unique_id()
    result, comm = nccl.native.init(1, uid, 0, [], 60.0)
    assert (result != 0, comm) == (True, 0)
    error = error_of("NCCL", "CommInitRank", result, nccl.native.last_error(0))
    assert "no usable GPU driver here" in error.hint


def test_config_is_as_long_as_each_version_has_it() -> None:
    # Sizes of ncclConfig_t in the public headers.
    sizes = {21800: 48, 22600: 48, 22700: 72, 22800: 80, 22900: 88, 23000: 96, 23100: 120, 23203: 120}
    assert {version: _core.nccl_config_bytes(version) for version in sizes} == sizes
