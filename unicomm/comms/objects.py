"""Python objects between ranks.

Objects travel as bytes of `torch.save` and are read by `torch.load(weights_only=True)`: tensors, numbers,
text, bytes, None and containers of them, and whatever was registered with
`torch.serialization.add_safe_globals`. Nothing in a message can then execute code. `codec="pickle"` takes any
object, and executes what the sender wants; use it among ranks you trust.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import MutableSequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import InvalidArgumentError
from .ops import OPERATIONS

if TYPE_CHECKING:
    from .communicator import Communicator

_CODECS = ("safe", "pickle")


def _encode(comm: Communicator, obj: Any, codec: str) -> torch.Tensor:
    if codec == "pickle":
        data = pickle.dumps(obj)
    elif codec == "safe":
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        data = buffer.getvalue()
        try:  # here rather than at the receivers, where it would come too late
            _decode_safe(data)
        except pickle.UnpicklingError as error:
            raise InvalidArgumentError(
                f"a {type(obj).__name__} cannot travel safely: {str(error).splitlines()[0]}",
                comm=comm.get_name(),
                rank=comm.get_rank(),
                hint='register its class with torch.serialization.add_safe_globals, or pass codec="pickle"',
            ) from None
    else:
        raise InvalidArgumentError(f"codec '{codec}' is unknown", hint=f"one of {', '.join(_CODECS)}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decode_safe(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _decode(data: torch.Tensor, codec: str) -> Any:
    raw = data.cpu().numpy().tobytes()
    return pickle.loads(raw) if codec == "pickle" else _decode_safe(raw)


def _sizes(comm: Communicator, n: int) -> list[int]:
    mine = torch.tensor([n], dtype=torch.int64, device=comm.get_device())
    everyone = torch.empty(comm.get_size(), dtype=torch.int64, device=comm.get_device())
    comm.all_gather_single(everyone, mine, False)
    return [int(size) for size in everyone]


def _room(comm: Communicator, n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device=comm.get_device())


def all_gather_object(
    comm: Communicator, object_list: MutableSequence[Any], obj: Any, codec: str = "safe"
) -> None:
    """Rank i's `obj` goes to `object_list[i]` on all ranks, which all call this."""
    _check_list(comm, "all_gather", object_list)
    data = _encode(comm, obj, codec).to(comm.get_device())
    parts = [_room(comm, size) for size in _sizes(comm, data.numel())]
    comm.all_gather_v(parts, data, False)
    object_list[:] = [_decode(part, codec) for part in parts]


def gather_object(
    comm: Communicator,
    obj: Any,
    object_gather_list: MutableSequence[Any] | None = None,
    root: int = 0,
    codec: str = "safe",
) -> None:
    """Rank i's `obj` goes to the root's `object_gather_list[i]`; the others pass None."""
    row = OPERATIONS["gather"]
    root = comm._engine.check.check_rank(row, "root", root)
    if comm.get_rank() == root:
        _check_list(comm, "gather", object_gather_list)
    data = _encode(comm, obj, codec).to(comm.get_device())
    sizes = _sizes(comm, data.numel())
    longest = max(sizes)
    padded = _room(comm, longest)
    padded[: data.numel()] = data
    if comm.get_rank() != root:
        comm.gather([], padded, root, False)
        return
    parts = [_room(comm, longest) for _ in sizes]
    comm.gather(parts, padded, root, False)
    assert object_gather_list is not None
    object_gather_list[:] = [_decode(p[:n], codec) for p, n in zip(parts, sizes, strict=True)]


def broadcast_object_list(
    comm: Communicator, object_list: MutableSequence[Any], root: int = 0, codec: str = "safe"
) -> None:
    """Replaces the entries of `object_list` by the root's. Lists have the same length on all ranks."""
    row = OPERATIONS["broadcast"]
    root = comm._engine.check.check_rank(row, "root", root)
    device = comm.get_device()
    header = torch.zeros(2, dtype=torch.int64, device=device)
    data = None
    if comm.get_rank() == root:
        data = _encode(comm, list(object_list), codec).to(device)
        header = torch.tensor([data.numel(), len(object_list)], dtype=torch.int64, device=device)
    comm.broadcast(header, root, False)
    size, length = (int(n) for n in header)
    if data is None:
        data = _room(comm, size)
    comm.broadcast(data, root, False)
    if length != len(object_list):
        comm._engine.check.fail(
            row,
            f"object_list has {len(object_list)} entries, the root's {length}",
            "make the lists equally long",
        )
    object_list[:] = _decode(data, codec)


def scatter_object_list(
    comm: Communicator,
    output_list: MutableSequence[Any],
    input_list: MutableSequence[Any] | None = None,
    root: int = 0,
    codec: str = "safe",
) -> None:
    """The root's `input_list[i]` goes to rank i's `output_list[0]`. Called by all ranks."""
    row = OPERATIONS["scatter"]
    root = comm._engine.check.check_rank(row, "root", root)
    if not output_list:
        comm._engine.check.fail(row, "output_list is empty", "pass a list with one entry, e.g. [None]")
    device, n = comm.get_device(), comm.get_size()
    datas: list[torch.Tensor] = []
    if comm.get_rank() == root:
        _check_list(comm, "scatter", input_list)
        assert input_list is not None
        datas = [_encode(comm, obj, codec).to(device) for obj in input_list]
    sizes = torch.zeros(n, dtype=torch.int64, device=device)
    if datas:
        sizes = torch.tensor([d.numel() for d in datas], dtype=torch.int64, device=device)
    comm.broadcast(sizes, root, False)
    longest = int(sizes.max())
    padded = []
    for data in datas:
        padded.append(_room(comm, longest))
        padded[-1][: data.numel()] = data
    mine = _room(comm, longest)
    comm.scatter(mine, padded, root, False)
    output_list[0] = _decode(mine[: int(sizes[comm.get_rank()])], codec)


def send_object_list(
    comm: Communicator, object_list: MutableSequence[Any], dst: int, codec: str = "safe"
) -> None:
    """Sends a list of objects to rank `dst`, which calls `recv_object_list`."""
    data = _encode(comm, list(object_list), codec).to(comm.get_device())
    comm.send(torch.tensor([data.numel()], dtype=torch.int64, device=comm.get_device()), dst, False)
    comm.send(data, dst, False)


def recv_object_list(
    comm: Communicator, object_list: MutableSequence[Any], src: int, codec: str = "safe"
) -> None:
    """Replaces the entries of `object_list` by those that rank `src` sends."""
    size = torch.empty(1, dtype=torch.int64, device=comm.get_device())
    comm.recv(size, src, False)
    data = _room(comm, int(size))
    comm.recv(data, src, False)
    object_list[:] = _decode(data, codec)


def _check_list(comm: Communicator, op: str, objects: object) -> None:
    n = comm.get_size()
    if not isinstance(objects, MutableSequence) or len(objects) != n:
        comm._engine.check.fail(
            OPERATIONS[op], "the object list must have one entry per rank", f"pass [None] * {n}"
        )
