"""Names of torchcomms' extension module, which torch and programs import from it."""

from unicomm.c10d.switch import BackendWrapper as _BackendWrapper
from unicomm.comms.execution.hooks import RemovableHandle
from unicomm.comms.operations.reduction import RedOpType, ReduceOp
from unicomm.comms.operations.table import OpName
from unicomm.comms.work import TorchWork, WorkStatus

from .batch import BatchSendRecv, P2POp, P2POpType
from .communicator import TorchComm
from .creation import (
    get_mem_allocator,
    new_comm,
    register_backend,
)
from .creation import is_backend_registered as _is_backend_registered
from .hook_arguments import (
    AllGatherPreHookArgs,
    AllGatherSinglePreHookArgs,
    AllGatherVPreHookArgs,
    AllReducePreHookArgs,
    AllToAllPreHookArgs,
    AllToAllSinglePreHookArgs,
    AllToAllVSinglePreHookArgs,
    BarrierPreHookArgs,
    BatchOpIssuePostHookArgs,
    BatchOpIssuePreHookArgs,
    BroadcastPreHookArgs,
    CollectivePostHookArgs,
    FinalizePostHookArgs,
    FinalizePreHookArgs,
    GatherPreHookArgs,
    GatherSinglePreHookArgs,
    NewWindowPostHookArgs,
    NewWindowPreHookArgs,
    RecvPreHookArgs,
    ReducePreHookArgs,
    ReduceScatterPreHookArgs,
    ReduceScatterSinglePreHookArgs,
    ReduceScatterVPreHookArgs,
    ScatterPreHookArgs,
    SendPreHookArgs,
    SplitPostHookArgs,
    SplitPreHookArgs,
)
from .options import BatchP2POptions, CommOptions, ReconfigureOptions
from .window import TorchCommWinAccessType, TorchCommWindow, TorchCommWindowAttr

__all__ = [
    "AllGatherPreHookArgs",
    "AllGatherSinglePreHookArgs",
    "AllGatherVPreHookArgs",
    "AllReducePreHookArgs",
    "AllToAllPreHookArgs",
    "AllToAllSinglePreHookArgs",
    "AllToAllVSinglePreHookArgs",
    "BarrierPreHookArgs",
    "BatchOpIssuePostHookArgs",
    "BatchOpIssuePreHookArgs",
    "BatchP2POptions",
    "BatchSendRecv",
    "BroadcastPreHookArgs",
    "CollectivePostHookArgs",
    "CommOptions",
    "FinalizePostHookArgs",
    "FinalizePreHookArgs",
    "GatherPreHookArgs",
    "GatherSinglePreHookArgs",
    "NewWindowPostHookArgs",
    "NewWindowPreHookArgs",
    "OpName",
    "P2POp",
    "P2POpType",
    "ReconfigureOptions",
    "RecvPreHookArgs",
    "RedOpType",
    "ReduceOp",
    "ReducePreHookArgs",
    "ReduceScatterPreHookArgs",
    "ReduceScatterSinglePreHookArgs",
    "ReduceScatterVPreHookArgs",
    "RemovableHandle",
    "ScatterPreHookArgs",
    "SendPreHookArgs",
    "SplitPostHookArgs",
    "SplitPreHookArgs",
    "TorchComm",
    "TorchCommWinAccessType",
    "TorchCommWindow",
    "TorchCommWindowAttr",
    "TorchWork",
    "WorkStatus",
    "_BackendWrapper",
    "_is_backend_registered",
    "get_mem_allocator",
    "new_comm",
    "register_backend",
]
