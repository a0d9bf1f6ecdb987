"""DeviceMesh with torchcomms' signatures, over `unicomm.c10d.device_mesh`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unicomm.c10d import device_mesh as ours
from unicomm.c10d.compat import add_flattened_mesh

from .communicator import TorchComm


def init_device_mesh(
    mesh_dim_comms: Sequence[TorchComm],
    mesh_dim_names: Sequence[str],
    _global_comm: TorchComm | None = None,
) -> DeviceMesh:
    """Makes a `DeviceMesh` whose dimension `mesh_dim_names[i]` communicates by `mesh_dim_comms[i]`.

    All ranks call it. The group of a dimension has the dimension's name. `_global_comm`, a communicator of
    all ranks, is needed for two or more dimensions, unless torch.distributed is initialized. Raises as
    `unicomm.c10d.device_mesh.init_device_mesh` does.
    """
    return ours.mesh_over(mesh_dim_comms, mesh_dim_names, None, _global_comm, mesh_dim_names)


def _flatten_with_comm(
    mesh: DeviceMesh, mesh_dim_name: str, comm: TorchComm, global_ranks: Sequence[int], layout: Any
) -> DeviceMesh:
    """Gives `mesh` the flattened dimension `mesh_dim_name`, which communicates by `comm`.

    `global_ranks[i]` is the global rank of rank i of `comm`. `layout`: torch's `_MeshLayout` of the
    dimensions that are flattened.
    """
    group = ours.listed_group(comm, mesh_dim_name, list(global_ranks)[: comm.get_size()])
    flat: DeviceMesh = add_flattened_mesh(mesh, mesh_dim_name, group, layout)
    return flat


def _create_torchcomm_process_group(
    comm: TorchComm,
    group_name: str,
    backend_str: str = "torchcomm",
    global_ranks_mapping: Mapping[int, int] | None = None,
) -> dist.ProcessGroup:
    """Returns the process group over `comm`, listed in torch.distributed under `group_name`.

    `global_ranks_mapping`: global rank to rank of `comm`. torch knows the backend as "unicomm", whatever
    `backend_str` says.
    """
    ranks = None
    if global_ranks_mapping is not None:
        ranks = sorted(global_ranks_mapping, key=lambda rank: global_ranks_mapping[rank])
    return ours.listed_group(comm, group_name, ranks)
