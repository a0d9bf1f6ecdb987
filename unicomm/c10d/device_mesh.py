"""A torch `DeviceMesh` over existing communicators, one for each dimension.

world = unicomm.new_comm("auto", torch.device("cpu"))
dp, tp = world.split(...), world.split(...)
mesh = init_device_mesh((dp, tp), ("dp", "tp"), global_comm=world)
fully_shard(model, mesh=mesh["dp"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import InvalidArgumentError, NotReadyError

from .compat import known_groups, list_group, set_default_group
from .process_group import UnicommProcessGroup


def init_device_mesh(
    comms: Sequence[Communicator],
    names: Sequence[str],
    mesh: torch.Tensor | None = None,
    global_comm: Communicator | None = None,
) -> DeviceMesh:
    """Makes a `DeviceMesh` whose dimension `names[i]` communicates by `comms[i]`.

    All ranks of the mesh call it. Nothing is sent. `destroy_process_group()` finalizes the communicators
    together with their groups.

    Args:
        comms: this rank's communicators. The ranks of `comms[i]` are the line of the mesh through this rank
            along dimension i, in order.
        names: the names of the dimensions.
        mesh: the global ranks, with one dimension for each communicator. May be omitted when ranks are evenly
            spaced along each dimension, as in `arange(n).reshape(...)`. As everywhere in torch, a global rank
            is a rank of the default group; after `reconfigure` it differs from the number in `get_ranks()`.
        global_comm: a communicator of all ranks of the job. Needed when torch.distributed is not initialized:
            it becomes the default group, because many parts of torch ask the default group for the process's
            rank. In a mesh of one dimension the default is `comms[0]`.

    Raises:
        InvalidArgumentError: the communicators do not form a mesh.
        NotReadyError: torch.distributed is not initialized and `global_comm` is missing.
    """
    return mesh_over(comms, names, mesh, global_comm, [""] * len(comms))


def mesh_over(
    comms: Sequence[Communicator],
    names: Sequence[str],
    mesh: torch.Tensor | None,
    global_comm: Communicator | None,
    group_names: Sequence[str],
) -> DeviceMesh:
    """`init_device_mesh` whose new groups are called `group_names[i]`; empty stands for a name of its own."""
    if not comms or len(comms) != len(names):
        raise InvalidArgumentError(
            f"{len(comms)} communicators for {len(names)} dimensions", hint="pass one for each dimension"
        )
    kinds = {comm.get_device().type for comm in comms}
    if len(kinds) > 1:
        raise InvalidArgumentError(
            f"the communicators are for different devices: {', '.join(sorted(kinds))}",
            hint="split them from one communicator",
        )
    initialized = dist.is_initialized()
    if not initialized and global_comm is None and len(comms) == 1:
        global_comm = comms[0]
    default = _default_comm() if initialized else global_comm
    lines = [_global_ranks(comm, default) for comm in comms]
    me = {line[comm.get_rank()] for line, comm in zip(lines, comms, strict=True)}
    if len(me) > 1:
        raise InvalidArgumentError(
            f"the communicators disagree about this rank: {sorted(me)}",
            hint="split them from one communicator",
        )
    rank = me.pop()
    whole = _spanned(lines, rank) if mesh is None else mesh.to(dtype=torch.int, device="cpu")
    _check(whole, lines, rank)
    if not initialized:
        if global_comm is None:
            raise NotReadyError(
                "torch.distributed is not initialized, and a mesh needs its default group",
                hint="pass global_comm=, a communicator of all ranks",
            )
        # In a mesh of one dimension it may be the group of that dimension, with its name.
        name = next((n for n, comm in zip(group_names, comms, strict=True) if comm is global_comm), "")
        set_default_group(listed_group(global_comm, name, range(global_comm.get_size())))
    groups: list[dist.ProcessGroup] = [
        listed_group(comm, name, line) for comm, name, line in zip(comms, group_names, lines, strict=True)
    ]
    return DeviceMesh.from_group(groups, kinds.pop(), whole, mesh_dim_names=tuple(names))


def _default_comm() -> Communicator | None:
    """The communicator of torch's default group, if that is one of ours."""
    group = dist.group.WORLD
    return group.get_comm() if isinstance(group, UnicommProcessGroup) else None


def _global_ranks(comm: Communicator, default: Communicator | None) -> list[int]:
    """The members' ranks in the default group, which torch calls global ranks.

    If the default group is not one of unicomm's, these are the members' ranks in the job.
    """
    if default is None:
        return comm.get_ranks()
    rank_of: Mapping[int, int] = {label: rank for rank, label in enumerate(default.get_ranks())}
    if strangers := [label for label in comm.get_ranks() if label not in rank_of]:
        raise InvalidArgumentError(
            f"ranks {strangers} of communicator {comm.get_name()!r} are not in the default group",
            hint="split the communicators from the one of all ranks",
        )
    return [rank_of[label] for label in comm.get_ranks()]


def _spanned(lines: Sequence[Sequence[int]], rank: int) -> torch.Tensor:
    """Returns the mesh spanned by the evenly spaced lines through `rank`."""
    first = rank
    grid = torch.zeros([len(line) for line in lines], dtype=torch.int)
    for dim, line in enumerate(lines):
        step = line[1] - line[0] if len(line) > 1 else 0
        if any(line[i] != line[0] + i * step for i in range(len(line))):
            raise InvalidArgumentError(
                f"ranks {list(line)} are not evenly spaced, so that the other lines cannot be told from them",
                hint="pass mesh=, the global ranks of the whole mesh",
            )
        first -= line.index(rank) * step
        shape = [1] * len(lines)
        shape[dim] = len(line)
        grid += (torch.arange(len(line), dtype=torch.int) * step).reshape(shape)
    return grid + first


def _check(mesh: torch.Tensor, lines: Sequence[Sequence[int]], rank: int) -> None:
    def wrong(message: str) -> InvalidArgumentError:
        return InvalidArgumentError(message, hint="the line through this rank is what its communicator spans")

    places = (mesh == rank).nonzero()
    if mesh.dim() != len(lines) or len(places) != 1 or len(set(mesh.flatten().tolist())) != mesh.numel():
        raise wrong(f"{mesh.tolist()} is no mesh of {len(lines)} dimensions that holds rank {rank} once")
    for dim, line in enumerate(lines):
        index: list[Any] = places[0].tolist()
        index[dim] = slice(None)
        if mesh[tuple(index)].tolist() != list(line):
            raise wrong(
                f"dimension {dim} of the mesh holds ranks {mesh[tuple(index)].tolist()}, its communicator"
                f" {list(line)}"
            )


def listed_group(
    comm: Communicator, name: str = "", ranks: Sequence[int] | None = None
) -> UnicommProcessGroup:
    """Returns the process group over `comm`, listed in torch.distributed like one that torch made.

    If there is none yet, it is made. `name` is its name, by default one of its own; `ranks` are the global
    ranks of its members, which are their ranks in the default group.
    """
    for known in known_groups():
        if isinstance(known, UnicommProcessGroup) and known.get_comm() is comm:
            return known
    group = UnicommProcessGroup(comm)
    name = name or f"{comm.get_name()} {comm._member.uid}"
    group._set_group_name(name)
    group._set_group_desc("mesh")
    if ranks is None:
        ranks = _global_ranks(comm, _default_comm() if dist.is_initialized() else None)
    list_group(group, name, comm.get_device().type, ranks)
    return group
