"""The mock through ctypes, and ranks as threads: what its own tests, and others without torch, use."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.threads import results

SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE = range(6)
REMOTE_ERROR, IN_PROGRESS, TIMEOUT = range(6, 9)
NOT_READY, INVALID_HANDLE = 600, 400  # of streams and events, as CUDA has them
SUM, PROD, MAX, MIN, AVG = range(5)
BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = 9, 10, 11
UNDEFINED = -(2**31)


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t of 2.32."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs")),
        ("netName", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("splitShare", "trafficClass")),
        ("commName", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ["collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs"]),  # 2.27
        *((name, ctypes.c_int) for name in ["nChannelsPerNetPeer", "nvlinkCentricSched"]),  # 2.28
        *((name, ctypes.c_int) for name in ["graphUsageMode", "numRmaCtx"]),  # 2.29
        ("maxP2pPeers", ctypes.c_int),  # 2.30
        *(
            (name, ctypes.c_int) for name in ["graphStreamOrdering", "launchOrderImplicit", "numRmaSig"]
        ),  # 2.31
        *((name, ctypes.c_int) for name in ["rmaEagerInit", "hostCftMode", "nvlsHostMode"]),
    ]

    def __init__(self, size: int = 120, magic: int = 0xCAFEBEEF, version: int = 23203, **fields: Any) -> None:
        super().__init__()
        for name, kind in self._fields_:
            if kind is ctypes.c_int:
                setattr(self, name, UNDEFINED)
        self.size, self.magic, self.version = size, magic, version
        for name, value in fields.items():
            setattr(self, name, value)


class WaitSignalDesc(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("opCnt", "peer", "sigIdx", "ctx")]


class CollConfig(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint)]


_P, _I, _Z, _U = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint
_ON = [_P, _P]  # communicator, stream
_SIGNATURES = {
    "ncclCommInitRank": [_P, _I, UniqueId, _I],
    "ncclCommInitRankConfig": [_P, _I, UniqueId, _I, _P],
    "ncclCommInitRankScalable": [_P, _I, _I, _I, _P, _P],
    "ncclCommSplit": [_P, _I, _I, _P, _P],
    "ncclCommShrink": [_P, _P, _I, _P, _P, _I],
    "ncclCommGetUniqueId": [_P, _P],
    "ncclCommGrow": [_P, _I, _P, _I, _P, _P],
    "ncclCommRevoke": [_P, _I],
    "ncclAllReduce": [_P, _P, _Z, _I, _I, *_ON],
    "ncclReduce": [_P, _P, _Z, _I, _I, _I, *_ON],
    "ncclBcast": [_P, _Z, _I, _I, *_ON],
    "ncclBroadcast": [_P, _P, _Z, _I, _I, *_ON],
    "ncclReduceScatter": [_P, _P, _Z, _I, _I, *_ON],
    "ncclAllGather": [_P, _P, _Z, _I, *_ON],
    "ncclAlltoAll": [_P, _P, _Z, _I, *_ON],
    "ncclAllToAll": [_P, _P, _Z, _I, *_ON],
    "ncclAllToAllv": [_P, _P, _P, _P, _P, _P, _I, *_ON],
    "ncclGather": [_P, _P, _Z, _I, _I, *_ON],
    "ncclScatter": [_P, _P, _Z, _I, _I, *_ON],
    "ncclSend": [_P, _Z, _I, _I, *_ON],
    "ncclRecv": [_P, _Z, _I, _I, *_ON],
    "ncclRedOpCreatePreMulSum": [_P, _P, _I, _I, _P],
    "ncclRedOpDestroy": [_I, _P],
    "ncclMemAlloc": [_P, _Z],
    "ncclCommRegister": [_P, _P, _Z, _P],
    "ncclCommWindowRegister": [_P, _P, _Z, _P, _I],
    "ncclPutSignal": [_P, _Z, _I, _I, _P, _Z, _I, _I, _U, *_ON],
    "ncclSignal": [_I, _I, _I, _U, *_ON],
    "ncclWaitSignal": [_I, _P, *_ON],
    "ncclCommSuspend": [_P, _I],
    "ncclCommMemStats": [_P, _I, _P],
    "mock_inject_error": [_P, _I],
    "mock_event_create": [_P, _I],
    "mock_stream_sleep": [_P, ctypes.c_double],
    "mock_stream_memset": [_P, _P, _I, _Z],
    "mock_stream_memcpy": [_P, _P, _P, _Z],
    "mock_event_elapsed_ms": [_P, _P, _P],
    "mock_set_device": [_I],
}
_WITH_CONFIG = [
    "AllReduce",
    "Reduce",
    "Broadcast",
    "ReduceScatter",
    "AllGather",
    "AlltoAll",
    "Gather",
    "Scatter",
]
_SIGNATURES |= {f"nccl{name}Config": [*_SIGNATURES[f"nccl{name}"], _P] for name in _WITH_CONFIG}
_SIGNATURES["ncclAlltoAllv"] = _SIGNATURES["ncclAllToAllv"]


class Failed(AssertionError):
    """A call did not return ncclSuccess."""

    def __init__(self, name: str, code: int, text: str) -> None:
        super().__init__(f"{name} returned {code}: {text}")
        self.code = code


class Mock:
    """One library; `call` raises Failed, `code` returns what the function returned."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: deque[Any] = deque(
            maxlen=1000
        )  # arrays: streams use them when their caller has long gone on
        self.lib = ctypes.CDLL(str(path))
        self.lib.mock_last_config.restype = ctypes.c_longlong
        for name in (
            "ncclGetErrorString",
            "ncclGetLastError",
            "mock_description",
            "mock_last_config_text",
        ):
            getattr(self.lib, name).restype = ctypes.c_char_p
        for name, types in _SIGNATURES.items():
            if hasattr(self.lib, name):
                getattr(self.lib, name).argtypes = types

    def code(self, name: str, *arguments: Any) -> int:
        self.kept.extend(a for a in arguments if isinstance(a, np.ndarray))
        values = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
        function = getattr(self.lib, name)
        if function.argtypes is None:  # handles only
            values = [ctypes.c_void_p(v) if isinstance(v, int) else v for v in values]
        return function(*values)

    def call(self, name: str, *arguments: Any) -> None:
        code = self.code(name, *arguments)
        if code:
            raise Failed(name, code, self.last_error())

    def out(self, name: str, *arguments: Any, kind: Any = ctypes.c_void_p, first: bool = False) -> Any:
        """What a function writes through its last (or first) pointer."""
        value = kind()
        place = [ctypes.byref(value)]
        self.call(name, *(place + [*arguments] if first else [*arguments, *place]))
        return value.value

    def last_error(self, comm: int | None = None) -> str:
        return self.lib.ncclGetLastError(ctypes.c_void_p(comm)).decode()

    def unique_id(self) -> UniqueId:
        uid = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(uid))
        return uid

    def init(self, nranks: int, uid: UniqueId, rank: int, config: Config | None = None) -> int:
        comm = ctypes.c_void_p()
        given = ctypes.byref(config) if config is not None else None
        self.call("ncclCommInitRankConfig", ctypes.byref(comm), nranks, uid, rank, given)
        return comm.value

    def stream(self) -> int:
        return self.out("mock_stream_create")

    def event(self, timing: bool = False) -> int:
        return self.out("mock_event_create", int(timing), first=True)

    def state(self, comm: int) -> int:
        return self.out("ncclCommGetAsyncError", comm, kind=ctypes.c_int)

    def synchronize(self, stream: int | None = None) -> None:
        self.call("mock_stream_synchronize", ctypes.c_void_p(stream))


def in_threads(n: int, body: Callable[[int], Any]) -> list[Any]:
    """`body(rank)` in a thread for each rank; the results, or the first rank's exception."""
    return results([partial(body, rank) for rank in range(n)])
