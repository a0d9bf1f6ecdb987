"""The communicator of MPI: its creation and its end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from unicomm._core import FaultCode
from unicomm.backends.bootstrap import addresses, mpi_library
from unicomm.backends.out_of_band import CHECK_HINT, SILENCE_HINT, connect_all
from unicomm.comms.backend import Capabilities, ChecksProcess, Exchange, OpensExchange, Setup
from unicomm.comms.errors import BackendError, CommTimeoutError, UnsupportedError
from unicomm.comms.failures.daemon_pool import call_within
from unicomm.comms.failures.faults import FINALIZED
from unicomm.comms.options import Hint

from .messages import MpiExchange
from .operations import REDUCTIONS, Operations


class MpiBackend(Operations, OpensExchange, ChecksProcess):
    name = "mpi"
    library = "MPI"
    receives_from_any = overlaps = True
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        operations=frozenset(
            [
                "broadcast",
                "all_reduce",
                "reduce",
                "all_gather_single",
                "reduce_scatter_single",
                "all_to_all_single",
                "gather_single",
                "barrier",
            ]
        ),
        reductions=REDUCTIONS,
        bytes_only=True,
        checks_mismatch=True,
        hints=(
            SILENCE_HINT,
            CHECK_HINT,
            Hint(
                "hostname",
                str,
                "",
                "Address at which this rank is told of failures. Default: by routing. For data, MPI chooses.",
            ),
        ),
    )

    @classmethod
    def check_usable(cls, size: int, told_by: str = "") -> None:
        MPI = mpi_library.load()  # noqa: N806
        if size > 1 and MPI.COMM_WORLD.Get_size() == 1:
            raise UnsupportedError(
                f"MPI ({mpi_library.name_of(MPI)}) knows this process alone, but there are {size} ranks"
                + (f" (by {told_by})" if told_by else ""),
                hint="start the program with the mpiexec of that library (or srun); torchrun starts no MPI"
                " processes. MPI4PY_LIBMPI chooses the library; `unicomm doctor` shows which is found",
            )

    @classmethod
    def connect(cls, setup: Setup) -> MpiBackend:
        MPI = mpi_library.load()  # noqa: N806
        if setup.size == 1:
            return cls(setup, MPI, MPI.COMM_SELF.Dup(), {})
        cls.check_usable(setup.size)
        addresses.guard_store(setup.store)
        place = addresses.here(setup.store)
        mine = {
            "place": place,
            "rank": MPI.COMM_WORLD.Get_rank(),
            "world": [
                MPI.COMM_WORLD.Get_size(),
                mpi_library.name_of(MPI),
                os.environ.get("PMIX_NAMESPACE", os.environ.get("PMI_JOBID", "")),
            ],
        }
        everyone = [json.loads(blob) for blob in setup.rendezvous.exchange("mpi", json.dumps(mine).encode())]
        ranks = [info["rank"] for info in everyone]
        _check_one_world(setup, [info["world"] for info in everyone], ranks)
        host, places = setup.hints["hostname"], [addresses.Place(*info["place"]) for info in everyone]
        if not host:
            cure = "name an address by the hint 'hostname'"
            host = addresses.choose_for(setup, places, cure) or "127.0.0.1"
        sockets = connect_all(setup, host, 1, cls.library)[0]
        try:
            here = sum(other.network == place.network for other in places)
            return cls(setup, MPI, _create(MPI, setup, ranks), sockets, here)
        except BaseException:
            for s in sockets.values():
                s.close()
            raise

    def open_exchange(self) -> Exchange:
        return MpiExchange(self)

    def close(self) -> None:
        super().close()
        for request, _ in self._prepared.values():
            if request is not None:
                request.Free()
        self._prepared.clear()
        fault = self.channel.fault
        if fault is not None and fault.code == FaultCode.PEER_LOST and fault.detail != FINALIZED:
            mpi_library.lose()
        if fault is None:
            # Collective by the standard, which expects it to be local; in all known libraries it is.
            self._comm.Free()

    @classmethod
    def version(cls) -> str:
        return mpi_library.version()


def _check_one_world(setup: Setup, worlds: Sequence[list[Any]], ranks: Sequence[int]) -> None:
    """Raises on all ranks if they belong to several MPI jobs or use several libraries."""
    odd = [setup.labels[r] for r, world in enumerate(worlds) if world != worlds[0]]
    twice = [setup.labels[r] for r, rank in enumerate(ranks) if rank in ranks[:r]]
    if odd or twice:
        jobs = "; ".join(sorted({f"{name}, {size} processes" for size, name, _ in worlds}))
        raise UnsupportedError(
            f"ranks {odd or twice} belong to another MPI job than rank {setup.labels[0]} ({jobs})",
            comm=setup.name,
            hint="start all ranks with one mpiexec, and give all the same MPI library (MPI4PY_LIBMPI)",
        )


def _create(MPI: Any, setup: Setup, ranks: Sequence[int]) -> Any:  # noqa: N803
    """Collective: returns an MPI communicator of these ranks, in order. A thread makes it, as it blocks."""
    group = MPI.COMM_WORLD.Get_group().Incl(list(ranks))
    # The tag tells this group from those that other threads create at the same time.
    tag = int(setup.rendezvous.uid, 16) % min(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767, 1 << 20)
    seconds = max(0.1, setup.rendezvous.remaining())
    try:
        made = call_within(seconds, "unicomm-mpi-create", lambda: MPI.COMM_WORLD.Create_group(group, tag))
    except TimeoutError:
        raise CommTimeoutError(
            "all ranks had arrived, but MPI did not make their communicator in time",
            comm=setup.name,
            hint="a rank may have died meanwhile: look at the others' output; raise timeout= for slow ones",
        ) from None
    except RuntimeError as error:
        group.Free()
        raise BackendError(
            f"MPI could not make the communicator: {error}",
            comm=setup.name,
            hint="is there a limit to the number of communicators? finalize those that are not needed",
        ) from error
    group.Free()
    made.Set_errhandler(MPI.ERRORS_RETURN)
    return made
