"""Puts, gets and signals between the ranks' copies of a symmetric tensor; views keep their offset.

`peer` is a rank of the communicator or team `comm`; `timeout` is in seconds, by default the communicator's.
"""

from __future__ import annotations

from datetime import timedelta

import torch

from unicomm.comms.communicator import Communicator
from unicomm.comms.execution.one_sided import issue
from unicomm.comms.memory.heap_window import wait_for
from unicomm.comms.memory.symmetric import SymmetricMemory, memory_of
from unicomm.comms.operations.arrays import Array
from unicomm.comms.operations.numbers import WORD, whole_number
from unicomm.comms.operations.symmetric_table import Capability, Compare, SignalOp
from unicomm.comms.operations.table import OPERATIONS

Timeout = timedelta | float | None


def _checked(op: str, array: Array, peer: int, comm: Communicator) -> tuple[SymmetricMemory, torch.Tensor]:
    memory = memory_of(comm._engine, op)
    memory.require(op, Capability.PUT_GET)
    tensor = memory.check_symmetric(op, "tensor", array)
    memory.engine.check.check_rank(OPERATIONS[op], "peer", peer)
    return memory, tensor


def put(tensor: Array, peer: int, comm: Communicator, timeout: Timeout = None) -> None:
    """Writes this rank's copy of a symmetric tensor into rank `peer`'s copy."""
    _move("put", True, tensor, peer, comm, timeout)


def get(tensor: Array, peer: int, comm: Communicator, timeout: Timeout = None) -> None:
    """Reads rank `peer`'s copy of a symmetric tensor into this rank's copy."""
    _move("get", False, tensor, peer, comm, timeout)


def _move(op: str, put: bool, array: Array, peer: int, comm: Communicator, timeout: Timeout) -> None:
    memory, tensor = _checked(op, array, peer, comm)

    def job(limit: float) -> None:
        if tensor.numel():
            at = _address(memory, op, tensor)
            memory.transfer(put, [(at, at, tensor.nbytes, peer)], limit)

    ins, outs = ([tensor], []) if put else ([], [tensor])
    issue(memory.engine, op, job, inputs=ins, outputs=outs, peer=peer, timeout=timeout)


def _address(memory: SymmetricMemory, op: str, tensor: torch.Tensor) -> int:
    """The tensor's address, asked for by a job: another thread may have freed the tensor since the call."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        memory.engine.invalid(op, "the tensor was freed since the call", "wait for the call before you free")


def _word(memory: SymmetricMemory, op: str, array: Array) -> torch.Tensor:
    memory.require(op, Capability.SIGNAL)
    sigpad = memory.check_symmetric(op, "sigpad", array)
    if sigpad.dtype not in (torch.int64, torch.uint64) or sigpad.numel() != 1:
        memory.engine.invalid(
            op,
            f"sigpad is {tuple(sigpad.shape)} of {sigpad.dtype}",
            "pass one element of a symmetric tensor of int64, such as pad[0]",
        )
    return sigpad


def _signal(memory: SymmetricMemory, op: str, signal: int) -> int:
    """The number as an unsigned word."""
    with memory.engine.located(op):
        return whole_number("signal", signal, *WORD) % (1 << 64)


def put_signal(
    tensor: Array,
    sigpad: Array,
    signal: int,
    peer: int,
    comm: Communicator,
    timeout: Timeout = None,
) -> None:
    """`put`, and then sets rank `peer`'s `sigpad`, a symmetric int64, to `signal`."""
    memory, source = _checked("put_signal", tensor, peer, comm)
    word = _word(memory, "put_signal", sigpad)
    signal = _signal(memory, "put_signal", signal)

    def job(limit: float) -> None:
        at, pad = _address(memory, "put_signal", source), _address(memory, "put_signal", word)
        fault = memory.domain.put_signal(at, at, source.nbytes, pad, signal, SignalOp.SET, peer, 0)
        memory.check(fault, limit)

    issue(memory.engine, "put_signal", job, inputs=[source], peer=peer, timeout=timeout)


def wait_signal(sigpad: Array, signal: int, peer: int, comm: Communicator, timeout: Timeout = None) -> None:
    """Waits until this rank's `sigpad` is `signal`. `peer` is who sends it, whom a timeout names."""
    memory = memory_of(comm._engine, "wait_signal")
    memory.engine.check.check_rank(OPERATIONS["wait_signal"], "peer", peer)
    word, signal = _word(memory, "wait_signal", sigpad), _signal(memory, "wait_signal", signal)

    def job(limit: float) -> None:
        pad = _address(memory, "wait_signal", word)
        wait_for(memory, pad, Compare.EQ, signal, peer, limit, False)

    issue(memory.engine, "wait_signal", job, peer=peer, timeout=timeout)
