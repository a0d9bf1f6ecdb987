"""The communicator of UCX: its creation and its end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial

from unicomm import _core
from unicomm.backends.out_of_band import connect_all, patience, refuse
from unicomm.backends.transport import HOT, TransportBackend, capabilities, find_place
from unicomm.comms.backend import Setup, SetupRendezvous
from unicomm.comms.errors import BackendError, InvalidArgumentError, first_line
from unicomm.comms.failures.faults import in_global_ranks
from unicomm.comms.options import Hint

from .library import open_library, version_text

_log = logging.getLogger("unicomm")
_HINT = "choose UCX's networks by the hints 'tls' and 'devices'; log_level=info shows what UCX does"
_SILENT = "a rank's first message did not come"
# UCX sends 8 KiB per system call by default, with which large data take up to 1.6 times as long. To receive
# up to 512 KiB per call takes 0.7 to 0.85 times as long as 128. By default UCX also blocks in connect(2),
# which lasts a minute if the host has just been cut off, and which nothing can cancel.
_TCP = [("TCP_TX_SEG_SIZE", "64k"), ("TCP_RX_SEG_SIZE", "512k"), ("TCP_CONN_NB", "y")]
_AT_MOST = 15.0, 0.05  # seconds for connecting once all ranks have come: in all, and for each rank
# What UCX says if it has found no device that reaches a rank, as while the link of a host is down; how many
# times the ranks look for devices then, and the seconds before each.
_UNREACHABLE, _TRIES, _PAUSE = "Destination is unreachable", 3, 1.0

LIBRARY = Hint("library", str, "", "File of libucp. Default: the loaded copy, of libucx, or of the system.")
TLS = Hint("tls", str, "", "UCX_TLS of this communicator, such as tcp or ^sm. Default: UCX chooses.")
DEVICES = Hint("devices", str, "", "UCX_NET_DEVICES of this communicator, such as eth0 or mlx5_0:1.")
LOG_LEVEL = Hint("log_level", str, "", "UCX_LOG_LEVEL of this process from now on, such as info.")


class UcxBackend(TransportBackend):
    name = library = "ucx"
    capabilities = capabilities(LIBRARY, TLS, DEVICES, LOG_LEVEL)

    @classmethod
    def connect(cls, setup: Setup) -> UcxBackend:
        library = open_library(setup.hints["library"])
        if (level := setup.hints["log_level"]) and not library.set_log_level(level):
            raise InvalidArgumentError(
                f"log_level={level!r} is no level of UCX's log", hint="such as warn, info or debug"
            )
        if setup.size == 1:
            return cls(setup, _worker(setup, library, HOT), {})
        place = find_place(setup, cls.library)
        worker, trouble = None, ""
        try:
            worker = _worker(setup, library, place.spin)
        except BackendError as error:
            trouble = error.message
        sockets = connect_all(setup, place.address, 1, cls.library, trouble)[0]
        assert worker is not None
        backend = cls(setup, worker, sockets)
        try:
            backend._meet(setup, partial(_worker, setup, library, place.spin))
        except BaseException:
            backend.close()
            raise
        return backend

    @property
    def worker(self) -> _core.UcxWorker:
        """Its transport."""
        assert isinstance(self.transport, _core.UcxWorker)
        return self.transport

    def _meet(self, setup: Setup, again: Callable[[], _core.UcxWorker]) -> None:
        """Connects to all ranks: each has to get a message from each other one. `again`: a new worker."""
        rendezvous = setup.rendezvous
        for left in reversed(range(_TRIES)):
            trouble = self._greet(rendezvous)
            troubles = [text.decode() for text in rendezvous.exchange("ucx connected", trouble.encode())]
            if not left or not any(_UNREACHABLE in text for text in troubles):
                break
            time.sleep(_PAUSE)
            self._use(again())
        if any(text not in ("", _SILENT) for text in troubles):
            troubles = [text if text != _SILENT else "" for text in troubles]  # these waited for the others
        refuse(troubles, rendezvous, setup.name, self.library)
        if _log.isEnabledFor(logging.INFO) and setup.rank == 0:
            ways = self.worker.transports(setup.size - 1)
            _log.info("communicator '%s': UCX %s by %s", setup.name, self.version(), ", ".join(ways))

    def _greet(self, rendezvous: SetupRendezvous) -> str:
        """Returns why this rank got no message from each other one, "" if it did."""
        theirs = rendezvous.exchange("ucx addresses", self.worker.address)
        trouble = ""
        try:
            self.worker.connect(theirs)
            least, for_each = _AT_MOST
            if not self.worker.greet(min(patience(rendezvous), least + for_each * rendezvous.size)):
                trouble = _SILENT
        except RuntimeError as error:
            trouble = first_line(error)
        if trouble and (fault := self.fault()) is not None:  # which may be the reason
            raise in_global_ranks(fault, rendezvous.labels)
        return trouble

    def transports(self, peer: int) -> list[str]:
        """Returns by which ways UCX reaches a rank, as transport/device; [] if this UCX does not tell."""
        return self.worker.transports(peer)

    @classmethod
    def version(cls) -> str:
        return version_text(open_library())


def _worker(setup: Setup, library: _core.UcxLibrary, spin: float) -> _core.UcxWorker:
    hinted = [("TLS", setup.hints["tls"]), ("NET_DEVICES", setup.hints["devices"])]
    settings = [(name, value, True) for name, value in hinted if value]
    # The user's own values stay; an older UCX takes these from its environment only.
    settings += [(name, value, False) for name, value in _TCP if f"UCX_{name}" not in os.environ]
    try:
        return _core.UcxWorker(library, setup.rank, setup.size, settings, spin)
    except RuntimeError as error:
        raise BackendError(f"UCX cannot start: {first_line(error)}", comm=setup.name, hint=_HINT) from error
