"""Symmetric memory: tensors that every rank of a communicator has at the same place, and one-sided access.

    memory.py       init, init_team, empty, free, rendezvous
    one_sided.py    put, get, put_signal, wait_signal
    collectives.py  broadcast, all-to-all, all-reduce, reduce-scatter
    experts.py      all-to-all with splits in symmetric memory: MoE dispatch and combine
    tiles.py        reductions of parts of matrices
    autograd.py     dispatch and combine with gradients
    in_torch.py     torch's own symmetric memory on CPU tensors, by an extension that is built on demand
    torch_operators.py, torch_kernels.py   which of its operations run, and those that torch writes in Python
    exchange.py     what these have in common: checks, and how the core runs them
    kernels/        the kernels for devices, compiled at run time
    torch_unit/     the source of the extension for torch's own symmetric memory

Operations, layouts of splits and offsets are those of `torch.ops.symm_mem`, with a communicator in place of
a group's name, a check of every output's capacity, and a barrier at the end (`relaxed=True` leaves it out).
"""

from unicomm.comms.operations.symmetric_table import Capability as Capability
from unicomm.comms.operations.symmetric_table import Compare as Compare
from unicomm.comms.operations.symmetric_table import SignalOp as SignalOp

from .autograd import ExpertExchange as ExpertExchange
from .autograd import Route as Route
from .collectives import all_to_all as all_to_all
from .collectives import all_to_all_v as all_to_all_v
from .collectives import broadcast as broadcast
from .collectives import one_shot_all_reduce as one_shot_all_reduce
from .collectives import reduce_scatter as reduce_scatter
from .collectives import two_shot_all_reduce_ as two_shot_all_reduce_
from .experts import all_to_all_vdev as all_to_all_vdev
from .experts import all_to_all_vdev_2d as all_to_all_vdev_2d
from .experts import all_to_all_vdev_2d_offset as all_to_all_vdev_2d_offset
from .in_torch import use_in_torch as use_in_torch
from .memory import Handle as Handle
from .memory import capabilities as capabilities
from .memory import empty as empty
from .memory import free as free
from .memory import init as init
from .memory import init_team as init_team
from .memory import rendezvous as rendezvous
from .memory import synchronize as synchronize
from .one_sided import get as get
from .one_sided import put as put
from .one_sided import put_signal as put_signal
from .one_sided import wait_signal as wait_signal
from .tiles import multi_root_tile_reduce as multi_root_tile_reduce
from .tiles import reduce_scatter_offset as reduce_scatter_offset
from .tiles import tile_reduce as tile_reduce
from .torch_operators import TorchOperator as TorchOperator
from .torch_operators import torch_operators as torch_operators
