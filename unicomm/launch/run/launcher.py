"""`unicomm run`: torchrun, with the switch on, a folder for rings, a hub, and a verdict when ranks fail.

It is torchrun: its argument parser, with a few options more, its launcher, its agent. What is added happens
beside the ranks; they are processes of torchrun as ever, with some more environment.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.distributed import config
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import utils as rendezvous
from torch.distributed.launcher import api

from unicomm.backends.bootstrap import addresses
from unicomm.backends.registry import find_backend
from unicomm.c10d import switch
from unicomm.comms.errors import CommError
from unicomm.flight_recorder.ring.folder import FolderError, private_folder
from unicomm.launch.hub.hub_process import HubProcess

from . import job_folder as run_folder
from . import summary as run_verdict
from .job import HubSettings, Job, agent_class

UNUSABLE = 2
_LOOPBACK = "127.0.0.1"
_DEFAULT_RENDEZVOUS = 29400  # torch's, for c10d

_ABOUT = """\
torchrun on unicomm. Programs of torch.distributed run unchanged on unicomm's communicators, the flight
recorder is on, and when a rank fails, the verdict stands under torchrun's error summary: which rank is to
blame, where in its program, and why the others waited.
"""
_EXAMPLES = """\
examples:
  all cores of this machine, and what the ranks do while they run (from another terminal):
    unicomm run --nproc-per-node 4 train.py --epochs 10
    unicomm trace top --connect localhost

  two machines; the same line on both:
    unicomm run --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node0:29400 train.py

  a module instead of a file; rings are kept in ./rings also when all goes well:
    unicomm run --nproc-per-node 2 --trace-dir rings -m package.train

  another backend, by a network interface of your choice:
    unicomm run --nnodes 2 --backend gloo --interface eth1 --rdzv-backend c10d --rdzv-endpoint node0 train.py

exit code: torchrun's; 2 when the command line is wrong. More: docs/run.md
"""


def parser() -> argparse.ArgumentParser:
    """torchrun's, with our options beside its own."""
    made = torchrun.get_args_parser()
    made.prog, made.description, made.epilog = "unicomm run", _ABOUT, _EXAMPLES
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    ours = made.add_argument_group("options of unicomm")
    ours.add_argument(
        "--backend",
        metavar="NAME",
        help="what stands behind the backends that the program names: auto (the default for CPU tensors), "
        "shm, gloo, ... (UNICOMM_BACKEND)",
    )
    ours.add_argument(
        "--trace-dir",
        "--trace_dir",
        metavar="FOLDER",
        type=Path,
        default=None,
        help="where rings go, and stay also when all goes well; default: a private folder in memory, where "
        "they stay when a rank fails (UNICOMM_TRACE_DIR)",
    )
    ours.add_argument(
        "--hub",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="a process on each host that serves `unicomm trace top --connect` and gathers the rings of all "
        "hosts when a rank fails; default: where pyzmq and msgspec are installed",
    )
    ours.add_argument(
        "--hub-port",
        "--hub_port",
        type=int,
        metavar="PORT",
        help=f"the hub's port; default: {run_folder.DEFAULT_PORT}, or any where that is taken; 0: any",
    )
    ours.add_argument(
        "--interface",
        metavar="NAME",
        help="network interface between the hosts; default: the one that leads to the rendezvous endpoint "
        "(UNICOMM_INTERFACE)",
    )
    return made


class UsageError(Exception):
    """The command line asks for something that cannot be; the message says what would do."""


def main(arguments: Sequence[str]) -> int:
    """Runs a job; the exit code. Raises `SystemExit` for `--help` and what the parser refuses."""
    options = parser().parse_args(arguments)
    try:
        _check(options)
        several = torchrun.parse_min_max_nnodes(options.nnodes)[1] > 1
        _choose_addresses(options, several)
        settings = _hub_settings(options, several)
        folder = _folder(options)
    except (UsageError, CommError, FolderError, OSError) as error:
        print(f"unicomm run: {error}", file=sys.stderr)
        return UNUSABLE
    kept = options.trace_dir is not None or os.environ.get("UNICOMM_TRACE_KEEP") == "always"
    _set_environment(options)
    hub = HubProcess(folder.hub_log) if settings is not None else None
    job = Job(folder, hub, settings)
    code = 1
    try:
        code = _run(options, job)
    finally:
        job.close(keep=kept or (code != 0 and bool(job.attempt.failure)))
    return code


def _run(options: argparse.Namespace, job: Job) -> int:
    def verdict() -> None:
        run_verdict.show(job.evidence())

    with _agent(job, verdict):
        try:
            record(torchrun.run)(options)
            return 0
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1 if error.code else 0
        except BaseException as error:  # as the interpreter does at its end: torchrun ends in this way
            sys.excepthook(type(error), error, error.__traceback__)
            if job.attempt.failure:
                verdict()
            return 130 if isinstance(error, KeyboardInterrupt) else 1


@contextlib.contextmanager
def _agent(job: Job, on_restart: Any) -> Iterator[None]:
    """torch.distributed.launcher makes our agent, which is its own with a few more steps."""
    before = vars(api)["LocalElasticAgent"]
    vars(api)["LocalElasticAgent"] = agent_class(job, on_restart)
    try:
        yield
    finally:
        vars(api)["LocalElasticAgent"] = before


# --- what is asked for --------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> None:
    if options.backend is not None:
        find_backend(options.backend)
    if options.hub_port is not None and not 0 <= options.hub_port < 1 << 16:
        raise UsageError(f"--hub-port {options.hub_port} is no port; use 0 ... 65535")
    if options.hub and (missing := _missing()):
        raise UsageError(f"--hub needs {missing}: pip install 'unicomm[hub]'")
    if options.interface:
        addresses.of_interface(options.interface)
        os.environ[addresses.INTERFACE] = options.interface


def _missing() -> str:
    return " and ".join(name for name in ("zmq", "msgspec") if find_spec(name) is None)


def _set_environment(options: argparse.Namespace) -> None:
    """Of the ranks, which inherit it."""
    os.environ[switch.VARIABLE] = "1"
    if options.backend is not None:
        os.environ[switch.CHOICE] = options.backend
    if options.run_path and options.start_method == "fork":
        # Ranks are copies of this process, which loaded torch without the switch.
        config.use_torchcomms = True
        switch.install()
    # Also what a rank leaves that ends well tells about those that do not; the launcher removes the rings.
    os.environ["UNICOMM_TRACE_KEEP"] = "always"


def _folder(options: argparse.Namespace) -> run_folder.RunFolder:
    given = options.trace_dir or os.environ.get("UNICOMM_TRACE_DIR")
    if given:
        return run_folder.RunFolder(Path(given).absolute())
    base = private_folder()
    run_folder.clean(base)
    return run_folder.RunFolder(base)


# --- addresses ----------------------------------------------------------------------------------------


def _choose_addresses(options: argparse.Namespace, several: bool) -> None:
    """By routing to the rendezvous endpoint, where torchrun would trust the host's name to mean an address.

    A name often means loopback, or nothing, and then the hosts do not find each other. What the user says
    goes before this.
    """
    if not several:
        return
    host, port = _endpoint(options)
    if options.local_addr is None and (address := _address(host)):
        options.local_addr = address
    if (
        options.rdzv_backend == "c10d"
        and "is_host" not in options.rdzv_conf
        and not rendezvous._matches_machine_hostname(host)
        and _can_listen(host, port)
    ):
        options.rdzv_conf = ",".join(filter(None, (options.rdzv_conf, "is_host=true")))


def _endpoint(options: argparse.Namespace) -> tuple[str, int]:
    if options.standalone:
        return "localhost", 0
    endpoint = str(torchrun.get_rdzv_endpoint(options))  # type: ignore[no-untyped-call]
    if options.rdzv_backend not in ("c10d", "static", "etcd", "etcd-v2"):
        return "", 0
    try:
        found = rendezvous.parse_rendezvous_endpoint(endpoint.replace(":None", ""), _DEFAULT_RENDEZVOUS)
    except ValueError as error:
        raise UsageError(f"--rdzv-endpoint {endpoint}: {error}") from None
    return str(found[0]), int(found[1])


def _address(host: str) -> str:
    """This host's address for the others; "" where all are on this host, or no way leads anywhere."""
    if interface := addresses.chosen_interface():
        return addresses.of_interface(interface)
    if _is_loopback(host):
        return ""
    return addresses.route_to(host) or addresses.route_anywhere()


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host in ("", "localhost")


def _can_listen(host: str, port: int) -> bool:
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                return True
    except OSError:
        pass
    return False


def _hub_settings(options: argparse.Namespace, several: bool) -> HubSettings | None:
    """How the hub listens: at loopback, unless there are other hosts. None: there is none."""
    if options.hub is False:
        return None
    if missing := _missing():
        if several:
            print(
                f"unicomm run: each host's rings stay there, for want of {missing}:"
                " pip install 'unicomm[hub]'",
                file=sys.stderr,
            )
        return None
    from unicomm.launch.hub.protocol import HubError, new_token, own_token

    try:
        token = own_token() or ("" if several else new_token())
    except HubError as error:
        raise UsageError(str(error)) from None
    address = options.local_addr if several else None
    port = run_folder.DEFAULT_PORT if options.hub_port is None else options.hub_port
    return HubSettings(token, address or _LOOPBACK, port, options.hub_port is None, several)
