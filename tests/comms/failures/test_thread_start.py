"""Threads start or end in an error, also in a process that may have no more memory."""

import sys

from tests.processes.forked_interpreters import run

_LIMITED = """
import datetime, resource, threading
import torch.distributed as dist
from unicomm.comms.failures.store_requests import requests_of
from unicomm.comms.failures.thread_start import start

store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=30))
warm = threading.Thread(target=int)  # leaves its stack to the next one
start(warm)
warm.join()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), resource.RLIM_INFINITY))
"""


def test_without_memory_a_start_is_an_error():
    code = _LIMITED + (
        "try: start(threading.Thread(target=int))\n"
        "except OSError as error: print('no start:', error.strerror)\n"
    )
    done = run([sys.executable, "-c", code])
    assert done.stdout.split() == ["no", "start:", "Cannot", "allocate", "memory"], done.stderr


def test_without_memory_for_a_thread_the_caller_asks_the_store():
    code = _LIMITED + (
        "requests = requests_of(store)\n"
        "requests.ask(store, 30, lambda: store.set('key', 'value'))\n"
        "print(requests.ask(store, 30, lambda: store.get('key')).decode())\n"
    )
    done = run([sys.executable, "-c", code])
    assert done.stdout.split() == ["value"], done.stderr


def test_without_memory_an_asynchronous_operation_breaks_the_communicator():
    """The operation has taken its number, so the other rank would wait for it."""
    code = (
        "import resource, torch, unicomm\n"
        "from unicomm.testing import run_ranks\n"
        "def program(comm):\n"
        "    x = torch.ones(5)\n"
        "    comm.barrier(False)\n"
        "    if comm.get_rank() == 0:\n"
        "        pages = int(open('/proc/self/statm').read().split()[0])\n"
        "        room = pages * resource.getpagesize() + (1 << 20)\n"
        "        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))\n"
        "        try: comm.all_reduce(x, unicomm.ReduceOp.SUM, True)\n"
        "        except OSError as error: said = [error.strerror]\n"
        "        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)\n"
        "    else:\n"
        "        said = []\n"
        "    try: comm.all_reduce(x, unicomm.ReduceOp.SUM, False)\n"
        "    except unicomm.CommError as error: said += [type(error).__name__, error.culprits]\n"
        "    comm.finalize()\n"
        "    return said\n"
        "print(run_ranks(program, 2, timeout=60))\n"
    )
    done = run([sys.executable, "-c", code])
    assert done.stdout.strip() == (
        "[['Cannot allocate memory', 'BackendError', ()], ['AbortedError', (0,)]]"
    ), done.stderr
