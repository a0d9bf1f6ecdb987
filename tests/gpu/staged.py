"""A communicator of ranks that share one device, which NCCL refuses: what it moves goes through the host.

It is there so that several processes on one GPU can have symmetric memory, whose operations are kernels and
memory of the device itself; nothing of those goes this way.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from unicomm.backends.shm import ShmBackend
from unicomm.backends.vendor.device_runtime import CUDA, HIP, ipc_table
from unicomm.comms.backend import (
    Backend,
    ChecksPeers,
    HasSymmetricMemory,
    RunsCollectives,
    Setup,
    UsesStreams,
)
from unicomm.comms.streams import Streams, TorchStreams


class Staged(Backend, RunsCollectives, UsesStreams, HasSymmetricMemory, ChecksPeers):
    name = "staged"
    protocol_version = 1
    capabilities = replace(
        ShmBackend.capabilities,
        device_types=frozenset({"cuda"}),
        captured=False,
    )

    def __init__(self, host: ShmBackend, device: torch.device) -> None:
        self._host = host
        self._streams = self.device_streams(device)

    @classmethod
    def connect(cls, setup: Setup) -> Staged:
        parent = setup.parent._host if isinstance(setup.parent, Staged) else None
        host = replace(setup, device=torch.device("cpu"), parent=parent)
        return cls(ShmBackend.connect(host), setup.device)

    @classmethod
    def device_streams(cls, device: torch.device) -> Streams:
        return TorchStreams(device)

    def streams(self) -> Streams:
        return self._streams

    def collective(self, call: Any, run: Any) -> None:
        self._come()
        self._host.collective(call, run)

    def run(self, call: Any) -> None:
        staged = {id(x): x.cpu() for x in (*call.inputs, *call.outputs)}
        inputs, outputs = ([staged[id(x)] for x in tensors] for tensors in (call.inputs, call.outputs))
        self._host.run(call.changed(inputs=inputs, outputs=outputs))
        for to, source in zip(call.outputs, outputs, strict=True):
            to.copy_(source)

    def exchange(self, messages: Any, timeout: float) -> None:
        self._come()
        staged = [message._replace(tensor=message.tensor.cpu()) for message in messages]
        self._host.exchange(staged, timeout)
        for message, there in zip(messages, staged, strict=True):
            if not message.send:
                message.tensor.copy_(there.tensor)

    def _come(self) -> None:
        """Until the current stream has come to this call."""
        event = self._streams.record(self._streams.current())
        while not self._streams.is_over(event):
            time.sleep(0.0002)

    def close(self) -> None:
        self._host.close()

    def abort(self) -> None:
        self._host.abort()

    def check_peers(self, ranks: Any) -> None:
        self._host.check_peers(ranks)

    def left(self, ranks: Any) -> Any:
        return self._host.left(ranks)

    def raise_fault(self, fault: Any, timeout: float) -> Any:
        self._host.raise_fault(fault, timeout)

    def host(self) -> str:
        return "one"

    def symmetric_table(self, one_host: bool = True) -> Any:
        return ipc_table(CUDA if torch.version.hip is None else HIP)
