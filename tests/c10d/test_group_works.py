"""Work objects of a process group: several streams wait for one; only a dispatch mode keeps another."""

import gc
import threading

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from unicomm import new_comm
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.c10d.process_group_work import ProcessGroupWork
from unicomm.comms.execution.device.work import StreamWork


class Device:
    """The executor of a device and its streams, which note what they are told."""

    def __init__(self):
        self.guard = threading.Lock()
        self.streams = self
        self.stream = "first"
        self.told = []

    def current(self):
        return self.stream

    def record(self, stream):
        self.told.append(("record", stream))
        return f"event of {stream}"

    def wait(self, stream, event):
        self.told.append(("wait", stream, event))

    def order_after(self, work):
        self.told.append(("operation", self.stream))

    def error_of(self, work):
        return None


def test_every_stream_that_waits_comes_after_what_the_first_one_writes_back():
    device = Device()
    work = ProcessGroupWork([StreamWork("all_reduce", 1, device, "own")], [torch.ones(1)])
    work.then_do(lambda: device.told.append(("copy", device.stream)), [torch.ones(1)], ())
    work.wait()
    assert device.told == [
        ("operation", "first"),
        ("copy", "first"),
        ("record", "first"),
        ("wait", "first", "event of first"),
    ]
    device.told.clear()
    device.stream = "second"
    work.wait()
    assert device.told == [("operation", "second"), ("wait", "second", "event of first")]


class Keeping(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.returned = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.returned.append(func(*args, **(kwargs or {})))
        return self.returned[-1]


def test_a_work_that_only_a_mode_keeps_can_be_waited_for():
    with new_comm("shm", torch.device("cpu")) as comm:
        group, x = UnicommProcessGroup(comm), torch.ones(3)
        with Keeping() as mode:
            group.allreduce([x], dist.AllreduceOptions()).wait()
        boxed = next(value[1] for value in mode.returned if isinstance(value, tuple))
        gc.collect()
        waits = threading.Thread(target=lambda: dist.Work.unbox(boxed).wait(), daemon=True)
        waits.start()
        waits.join(60)
        assert not waits.is_alive()
