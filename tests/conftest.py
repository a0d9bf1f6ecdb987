"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# What processes of tests leave is nobody's business in the user's folders: rings, as test runners end their
# workers without a clean exit, and compiled code, of which a killed rank may leave half a file.
_OWN = {
    name: tempfile.mkdtemp(prefix="unicomm-tests-")
    for name in ("UNICOMM_TRACE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    if name not in os.environ
}
os.environ |= _OWN
# What tests compile is small: it needs no processes with torch to compile in, and no trial of vector
# instructions. numpy's threads wait by spinning.
for _name, _value in {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "OPENBLAS_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(_name, _value)
# Threads of the test runner, of those that read what other processes print, and of Jupyter's client, which
# never end, call no communicator: they shall hide no deadlock.
_HARMLESS = (
    "/pytest_timeout.py:/execnet/gateway_base.py:/tests/processes/rank_processes.py"
    ":/jupyter_core/utils/__init__.py:/asyncio/base_events.py"
)
os.environ.setdefault("UNICOMM_HARMLESS_THREADS", _HARMLESS)

# A shell has what it starts in the background ignore Ctrl-C, and so would the programs that tests interrupt.
_IN_MAIN = threading.current_thread() is threading.main_thread()
if _IN_MAIN and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = ["wheel"]  # tests of an installed wheel: tools/wheels.py runs them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped has failed")


def pytest_collection_finish() -> None:
    """Ten thousand tests are millions of objects, which no collection of garbage need look at again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.config.getoption("--no-skips"):
        report.outcome = "failed"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was skipped and why: one line a reason, the commonest first."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ").splitlines()[0] for report in skipped)
    if reasons:
        terminalreporter.section(f"{len(skipped)} skipped")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5}  {reason}")


def pytest_sessionfinish() -> None:
    for folder in _OWN.values():  # xdist's workers inherit them; who made them removes them
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def raised() -> Callable[..., BaseException]:
    """`raised(f, *args, **kwargs)`: the exception that a call raises; fails when it raises none.

    For ranks that go on after their error and return it, to be looked at by the test.
    """

    def catch(f: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException:
        try:
            result = f(*args, **kwargs)
        except BaseException as error:
            return error
        raise AssertionError(f"nothing was raised; the call returned {result!r}")

    return catch


@pytest.fixture
def fresh_recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A ring of the test's own: that of a test worker has seen more communicators than it can name."""
    from unicomm.flight_recorder.recording import writer

    monkeypatch.setattr(writer, "_recorder", None)
    yield
    if writer._recorder is not None:
        writer._recorder.close(True)


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """`eventually(condition)` returns when `condition()` is true; fails when it is not within 20 seconds."""
    from tests.eventually import eventually

    return eventually


@pytest.fixture(scope="session")
def forked_programs() -> Iterator[Any]:
    """Runs programs of torch.distributed as forked ranks: tests/processes/forked_programs.py."""
    from tests.processes.forked_programs import ForkedPrograms

    programs = ForkedPrograms()
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def mock_nccl_library() -> Callable[..., Path]:
    """`mock_nccl_library(22105, rccl=False)`: a mock of this version of NCCL, of the latest without one.

    See tests/mocks/nccl/library.cpp. The first call on a machine compiles, for about 4 s of one core: a test
    that may be first needs a long timeout. Skips without a C++ compiler.
    """
    from tests.mocks.nccl import build

    def path(version: int = build.LATEST, rccl: bool = False) -> Path:
        try:
            return build.library(version, rccl)
        except build.NoCompiler as error:
            pytest.skip(str(error))

    return path


@pytest.fixture
def mock_nccl(fresh_recorder: None) -> str:
    """The name of the backend over the newest mock NCCL; its ranks have a ring of the test's own."""
    from tests.mocks.nccl.kinds import of

    of("nccl-new")
    return "nccl-new"


@pytest.fixture(scope="session")
def mock_device() -> Any:
    """A backend with symmetric memory on a mock device; skips without a C++ compiler."""
    from tests.mocks.device import backend

    try:
        return backend.make("symm-device")
    except backend.NoCompiler as error:
        pytest.skip(str(error))
