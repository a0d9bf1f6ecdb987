"""What the device's runtime asks of whoever uses it beside torch: no error left for others, the right device
in every thread, and no graph's capture ended."""

import ctypes
import gc
import threading

import pytest
import torch
from device_double import NoCompiler, runtime

from unicomm import _core
from unicomm.comms.operations.symmetric_table import bytes_at

T = 30.0


@pytest.fixture
def cuda():
    try:
        library = ctypes.CDLL(str(runtime()))
    except NoCompiler as error:
        pytest.skip(str(error))
    library.double_bytes.restype = ctypes.c_size_t
    library.double_captures.restype = ctypes.c_bool
    library.cudaGetLastError()
    yield library
    library.double_capture(ctypes.c_bool(False))
    library.double_fail(0)


@pytest.fixture
def table(cuda):
    return _core.symm_cuda_ipc(str(runtime()))


def begin(table, rank=0, world=1, uid=None):
    if uid is None:
        fault, uid = table.unique_id(world, 1 << 16)
        assert fault is None
    return table.init(uid, rank, world, "one", T)


def in_thread(body):
    """Runs it in a new thread, as the collector's or the watchdog's, and returns what it returns."""
    results, errors = [], []

    def run():
        try:
            results.append(body())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    if errors:
        raise errors[0]
    return results[0]


def test_an_error_is_not_left_for_others(cuda, table):
    """torch asks for the last error after each kernel, and would raise what is none of its own."""
    cuda.double_fail(1)
    fault, domain = begin(table)
    assert "cudaMalloc" in fault[3]
    assert domain is None
    assert cuda.cudaGetLastError() == 0
    before = cuda.double_bytes()
    fault, domain = begin(table)
    assert fault is None
    assert cuda.double_bytes() > before


def test_peers_that_torch_has_enabled(cuda, table):
    fault, uid = table.unique_id(2, 1 << 16)
    assert fault is None
    got = {}

    def rank(number):
        def run():
            assert cuda.cudaSetDevice(number) == 0
            got[number] = begin(table, number, 2, uid)
            return cuda.cudaGetLastError()

        return run

    threads = [threading.Thread(target=lambda n=n: got.__setitem__(f"left {n}", rank(n)())) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[n][0] for n in (0, 1)] == [None, None]
    assert [got[f"left {n}"] for n in (0, 1)] == [0, 0]
    got.clear()


def test_memory_goes_from_whatever_thread(cuda, table):
    gc.collect()
    before = cuda.double_bytes()

    def make():
        assert cuda.cudaSetDevice(1) == 0
        return begin(table)

    fault, domain = in_thread(make)
    assert fault is None
    assert cuda.double_bytes() > before
    held = [domain]
    del domain

    def drop():
        held.clear()
        device = ctypes.c_int(-1)
        assert cuda.cudaGetDevice(ctypes.byref(device)) == 0
        return device.value, cuda.cudaGetLastError()

    assert in_thread(drop) == (0, 0)  # the thread's own device again
    assert cuda.double_bytes() == before


def test_tensors_on_the_devices_memory_hold_it(cuda, table):
    """As torch takes whatever device's, by DLPack."""
    gc.collect()
    before = cuda.double_bytes()
    fault, domain = begin(table)
    assert fault is None
    fault, address = domain.allocate(64, 64, T)
    assert fault is None
    whole = bytes_at(domain, address, 64, torch.device("cpu"))
    assert whole.data_ptr() == address
    assert (whole.dtype, whole.shape) == (torch.uint8, (64,))
    part = whole.view(torch.bfloat16)[3:].fill_(2)
    del domain, whole
    gc.collect()
    assert part.tolist() == [2.0] * 29
    assert cuda.double_bytes() > before
    del part
    assert cuda.double_bytes() == before


def test_heaps_have_no_neighbours(cuda, table):
    """A handle opens all of the 2 MiB that the runtime cuts smaller pieces from."""
    gc.collect()
    before = cuda.double_bytes()
    fault, domain = begin(table)
    assert fault is None
    assert cuda.double_bytes() - before == 2 << 20
    del domain
    assert cuda.double_bytes() == before


def test_no_capture_ends(cuda, table):
    gc.collect()
    before = cuda.double_bytes()
    cuda.double_capture(ctypes.c_bool(True))
    fault, domain = begin(table)
    assert fault is None
    del domain
    assert cuda.double_bytes() == before
    assert cuda.double_captures()
    mode = ctypes.c_int(1)
    assert cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    assert mode.value == 0  # the thread's mode was its own again
    cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
