"""The store of the launchers, as each launcher sees it."""

from __future__ import annotations

import socket
import time

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from unicomm.comms.membership.handles import notice_silence
from unicomm.comms.membership.remote_store import RemoteStore

from .connections import EndedError, NoLauncherError, SignedSocket, TokensDifferError

_GREETING = 10.0  # seconds that the host may take to greet
_PAUSES = (0.05, 1.0)  # seconds between two calls of a host that is not there: the first pause, the longest
_SILENT = 40  # seconds without an answer after which the connection to another host ends
_CURE = "set UNICOMM_JOB_TOKEN to one value for the launchers of all hosts, or use --token-file on all"


class LaunchersStore(RemoteStore):
    """The store of the launchers. Methods raise `RuntimeError` when its host is gone."""

    words = "the store of the launchers"
    longest_pause = 0.25  # hundreds of launchers may wait at once, and for long

    def __init__(self, host: str, port: int, token: str, timeout: float) -> None:
        """Calls the host, for up to `timeout` seconds. Raises `RendezvousConnectionError`."""
        self._at, self._token = (host, port), token
        self._connection = call(host, port, token, timeout)
        super().__init__(self._connection, timeout)  # type: ignore[arg-type]  # used as a socket is

    @property
    def seen_as(self) -> str:
        """This host's address, as the store's host sees it."""
        return self._connection.seen_as

    def _ask(self, name: str, *fields: bytes) -> list[bytes]:
        if self._unanswered:
            self._reconnect()
        return super()._ask(name, *fields)

    def _reconnect(self) -> None:
        """After a timeout, or an interruption by a signal, an answer may still be under way."""
        with self._lock:
            if self._unanswered:
                self._connection.close()
                try:
                    self._connection = call(*self._at, self._token, _GREETING, again=True)
                except RendezvousConnectionError as error:
                    raise RuntimeError(str(error)) from error
                self._socket = self._connection  # type: ignore[assignment]
                self._unanswered = ""


def call(host: str, port: int, token: str, timeout: float, again: bool = False) -> SignedSocket:
    """Calls the launcher that hosts the rendezvous until it comes. Raises `RendezvousConnectionError`.

    `again`: it has come before. If nobody listens now, it has ended.
    """
    where = f"{host}, port {port}"
    end, (pause, longest) = time.monotonic() + timeout, _PAUSES
    while True:
        try:
            return _call(host, port, token, min(_GREETING, max(0.1, end - time.monotonic())))
        except TokensDifferError as error:
            mine = "this one has one, too" if token else "this one has none"
            raise RendezvousConnectionError(
                f"the tokens of the job's hosts differ: {error} at {where}, and {mine}. {_CURE}"
            ) from None
        except NoLauncherError:
            raise RendezvousConnectionError(_no_launcher(where)) from None
        except OSError as error:
            gone = again and isinstance(error, ConnectionRefusedError)
            if gone or time.monotonic() + pause > end:
                if isinstance(error, EndedError):
                    raise RendezvousConnectionError(_no_launcher(where)) from error
                if gone:
                    raise RendezvousConnectionError(
                        f"the launcher at {where}, which hosted the rendezvous, has ended"
                    ) from error
                raise RendezvousConnectionError(
                    f"the host of the rendezvous was not reached at {where} within {timeout:g} s"
                    f" ({error.strerror or error}): see whether its launcher runs, whether --rdzv-endpoint"
                    " names it on all hosts, and whether a firewall is between"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _no_launcher(where: str) -> str:
    return (
        f"what answers at {where} is no launcher of `unicomm run`: start all hosts with `unicomm run`, none"
        " with torchrun, and check --rdzv-endpoint"
    )


def _call(host: str, port: int, token: str, seconds: float) -> SignedSocket:
    s = socket.create_connection((host, port), seconds)
    try:
        notice_silence(s, _SILENT)
        return SignedSocket(s, token)
    except TimeoutError as error:
        s.close()
        raise EndedError("it does not greet") from error
    except BaseException:
        s.close()
        raise
