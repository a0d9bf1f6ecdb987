"""`unicomm run`: torchrun, with the switch on, a folder for rings, a hub, and a verdict when ranks fail.

It uses torchrun's argument parser, with a few more options, its launcher and its agent. The ranks are
torchrun's processes, with a few more environment variables; everything else happens beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.distributed import config
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import utils as rendezvous

from unicomm.backends.bootstrap import addresses
from unicomm.backends.registry import find_backend
from unicomm.c10d import switch
from unicomm.c10d.choice import CHOICE
from unicomm.comms.errors import CommError
from unicomm.flight_recorder import extras
from unicomm.flight_recorder.analysis.verdict import Report
from unicomm.flight_recorder.ring.folder import FolderError, named_folder, private_folder
from unicomm.launch.exporter.exporter_process import LOOPBACK, ExporterProcess, listen
from unicomm.launch.hub.hub_process import HubProcess
from unicomm.launch.job_token import VARIABLE, TokenError, new_token, own_token, token_of_file
from unicomm.launch.rendezvous.handlers import our_rendezvous

from . import job_folder, summary, verdict_file
from .agent import our_agent, stopped
from .introduction import HubSettings
from .job import Evidence, Job
from .lasting_stderr import lasting_stderr
from .outcome import UNUSABLE, Ended, Outcome, outcome, stopped_outcome
from .stop_signals import Reacting, StopSignals
from .time_limit import time_limit

_ANALYZING = 60.0  # seconds that the verdict may take once its rings are there
_DEFAULT_RENDEZVOUS = 29400  # torch's, for c10d

_ABOUT = """\
torchrun on unicomm. Programs of torch.distributed run unchanged on unicomm's communicators, and the flight
recorder is on. When a rank fails, a verdict follows torchrun's error summary: which rank is the culprit,
at which line of its program, and why the other ranks waited.
"""
_EXAMPLES = """\
examples:
  four ranks on this machine, and a view of what they do (from another terminal):
    unicomm run --nproc-per-node 4 train.py --epochs 10
    unicomm trace top --connect localhost

  two machines; the same line on both:
    unicomm run --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node0:29400 train.py

  a module instead of a file; rings stay in ./rings even if the job succeeds:
    unicomm run --nproc-per-node 2 --trace-dir rings -m package.train

  another backend, and a chosen network interface:
    unicomm run --nnodes 2 --backend gloo --interface eth1 --rdzv-backend c10d --rdzv-endpoint node0 train.py

exit code: that of the rank that failed first, 128 + n if signal n ended it; 130 and 143 after Ctrl-C and
SIGTERM; 2 when the options contradict each other. More: docs/run.md
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
        help="the backend to use instead of the one that the program names: auto (the default for CPU "
        "tensors), shm, gloo, ... (UNICOMM_BACKEND)",
    )
    ours.add_argument(
        "--trace-dir",
        "--trace_dir",
        metavar="FOLDER",
        type=Path,
        default=None,
        help="folder for rings, which stay there even if the job succeeds; default: a private folder in "
        "memory, where they stay only if a rank fails (UNICOMM_TRACE_DIR)",
    )
    ours.add_argument(
        "--hub",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run a process on each host that serves `unicomm trace top --connect` and gathers the rings of "
        "all hosts when a rank fails; default: if pyzmq and msgspec are installed",
    )
    ours.add_argument(
        "--hub-port",
        "--hub_port",
        type=int,
        metavar="PORT",
        help=f"the hub's port; default: {job_folder.DEFAULT_PORT}, or any port if it is taken; 0: any port",
    )
    ours.add_argument(
        "--metrics-port",
        "--metrics_port",
        type=int,
        metavar="PORT",
        help="serve metrics of this host's ranks to Prometheus at this port while the job runs; 0: any port",
    )
    ours.add_argument(
        "--metrics-host",
        "--metrics_host",
        metavar="ADDRESS",
        help=f"address at which they are served; default: {LOOPBACK}; 0.0.0.0: all addresses of this host",
    )
    ours.add_argument(
        "--verdict-file",
        "--verdict_file",
        metavar="FILE",
        type=Path,
        default=None,
        help="write the exit code, its reason and the verdict there as JSON when the job ends",
    )
    ours.add_argument(
        "--interface",
        metavar="NAME",
        help="network interface between the hosts; default: the one that routes to the rendezvous endpoint "
        "(UNICOMM_INTERFACE)",
    )
    ours.add_argument(
        "--token-file",
        "--token_file",
        metavar="FILE",
        type=Path,
        default=None,
        help="file with the job's token, which the launchers of several hosts prove to each other that they "
        "know; only its owner may read it (UNICOMM_JOB_TOKEN)",
    )
    _without_abbreviations(made, ours._group_actions)
    return made


def _without_abbreviations(made: argparse.ArgumentParser, ours: Sequence[argparse.Action]) -> None:
    """Has our options be given in full. argparse looks at the program's arguments, too: `train.py --metrics`
    would else be an abbreviation of two of our options, and refused."""
    find = made._get_option_tuples

    def theirs(option: str) -> Any:
        return [found for found in find(option) if found[0] not in ours]

    made._get_option_tuples = theirs  # type: ignore[assignment, method-assign]


def _most_nodes(options: argparse.Namespace) -> int:
    try:
        most: int = torchrun.parse_min_max_nnodes(options.nnodes)[1]
    except (ValueError, RuntimeError):
        raise UsageError(f"--nnodes={options.nnodes}: pass a number, or MIN:MAX") from None
    return most


class UsageError(Exception):
    """An option is invalid or contradicts another; the message says what to use instead."""


def main(arguments: Sequence[str], stop: StopSignals | None = None) -> int:
    """Runs a job and returns its exit code. Raises `SystemExit` for `--help` and bad options.

    `stop` has the signals that have come so far. Without it signals are heeded from the start of the ranks.
    """
    with lasting_stderr():
        return _main(arguments, stop)


def _main(arguments: Sequence[str], stop: StopSignals | None) -> int:
    started = time.time()
    stop = stop or StopSignals()
    options = parser().parse_args(arguments)
    stop.only([name.strip() for name in options.signals_to_handle.split(",")])
    try:
        _check(options)
        several = _most_nodes(options) > 1
        _choose_addresses(options, several)
        token = _token(options)
        settings = _hub_settings(options, several, token)
        if options.verdict_file is not None:
            verdict_file.prepare(options.verdict_file)
        metrics = _metrics(options)
        folder = _folder(options)
    except (UsageError, CommError, FolderError, TokenError, OSError) as error:
        print(f"unicomm run: {error}", file=sys.stderr)
        return UNUSABLE
    kept = options.trace_dir is not None or os.environ.get("UNICOMM_TRACE_KEEP") == "always"
    _set_environment(options)
    hub = HubProcess(folder.hub_log) if settings is not None else None
    exporter = ExporterProcess(folder.exporter_log, metrics) if metrics is not None else None
    job = Job(folder, hub, settings, exporter)
    stop.give_up = job.abandon
    ending = _Ending(options.verdict_file, job, stop, started)
    end = Outcome(Ended.LAUNCHER_FAILED, 1)
    try:
        # Once the ranks have ended signals are only noted, and nothing waits without a limit: the verdict is
        # made once.
        with our_rendezvous(token):
            end = ending.conclude(_run(options, job, stop, ending))
    finally:
        job.close(keep=kept or (end.exit_code != 0 and bool(job.attempt.failure)))
    return end.exit_code


def _run(options: argparse.Namespace, job: Job, stop: StopSignals, ending: _Ending) -> BaseException | None:
    """Runs the ranks to their end, and returns torchrun's error."""
    reacting = Reacting(stop, ending.before_ranks)
    try:
        with (
            our_agent(job, stop, reacting.close, ending.show),
            stop.interrupting(stopped),
        ):
            record(torchrun.run)(options)
    except SystemExit as error:
        return error if error.code else None
    except BaseException as error:
        return error
    finally:
        reacting.close()
    return None


class _Ending:
    """The end of a job: torchrun's error, the verdict on each failed attempt, once, and the file."""

    def __init__(self, file: Path | None, job: Job, stop: StopSignals, started: float) -> None:
        self._file, self._job, self._stop, self._started = file, job, stop, started
        self._shown: dict[int, tuple[Evidence, Report | None]] = {}  # by attempt

    def conclude(self, error: BaseException | None) -> Outcome:
        """Says how the job ended."""
        attempt, stop = self._job.attempt, self._stop.first
        end = outcome(error, attempt, stop)
        if error is not None:
            _tell(error, end)
        if error is not None and attempt.failure and not attempt.replaced:
            self.show(error.get_first_failure()[0] if isinstance(error, ChildFailedError) else None)
        _, report = shown = self._shown.get(attempt.number, (None, None))
        end = outcome(error, attempt, stop, report.main.culprits if report else ())
        self._write(end, *shown)
        return end

    def show(self, root_cause: int | None = None) -> None:
        """Prints the verdict on an attempt that has failed. `root_cause`: the rank that torchrun calls so."""
        number = self._job.attempt.number
        if number not in self._shown:
            evidence = self._job.evidence()
            self._shown[number] = evidence, None
            with contextlib.suppress(TimeoutError), time_limit(_ANALYZING):
                self._shown[number] = (
                    evidence,
                    summary.show(evidence, not self._job.attempt.ended, root_cause),
                )

    def before_ranks(self, number: signal.Signals) -> None:
        """Says that a signal has ended the job before there were ranks."""
        end = stopped_outcome(number)
        print(f"unicomm run: {end.why}", file=sys.stderr, flush=True)
        self._write(end, None, None)

    def _write(self, end: Outcome, evidence: Evidence | None, report: Report | None) -> None:
        if self._file is None:
            return
        attempt, signals = self._job.attempt, self._stop.received
        try:
            data = verdict_file.verdict(end, attempt, signals, self._started, time.time(), evidence, report)
            verdict_file.write(self._file, data)
        except OSError as failed:
            print(f"unicomm run: cannot write {self._file}: {failed}", file=sys.stderr)


def _tell(error: BaseException, end: Outcome) -> None:
    """Prints what torchrun raised; it leaves that to the interpreter."""
    if isinstance(error, SignalException) or end.ended is Ended.NOT_STARTED:
        print(f"unicomm run: {end.why}", file=sys.stderr, flush=True)
    elif not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)


# --- options ------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> None:
    if options.backend is not None:
        find_backend(options.backend)
    if options.hub_port is not None and not 0 <= options.hub_port < 1 << 16:
        raise UsageError(f"--hub-port {options.hub_port} is not a port; use 0 ... 65535")
    if options.hub and (missing := _missing()):
        raise UsageError(f"--hub needs {missing}: pip install 'unicomm[hub]'")
    if options.interface:
        addresses.of_interface(options.interface)
        os.environ[addresses.INTERFACE] = options.interface


def _metrics(options: argparse.Namespace) -> socket.socket | None:
    """Returns the socket at which metrics are served; None if nobody asked for them."""
    if options.metrics_port is None:
        if options.metrics_host is not None:
            raise UsageError("--metrics-host needs --metrics-port")
        return None
    if find_spec("prometheus_client") is None:
        raise UsageError(extras.sentence("--metrics-port", ["prometheus-client"], "metrics"))
    if not 0 <= options.metrics_port < 1 << 16:
        raise UsageError(f"--metrics-port {options.metrics_port} is not a port; use 0 ... 65535")
    host = LOOPBACK if options.metrics_host is None else options.metrics_host
    try:
        return listen(host, options.metrics_port)
    except OSError as error:
        where = f"{host}, port {options.metrics_port}"
        why = error.strerror or error
        raise UsageError(f"--metrics-port: cannot listen at {where}: {why}; 0 takes any free port") from None


def _token(options: argparse.Namespace) -> str:
    """Returns the job's token, "" if it has none. Raises `UsageError` if it has two, and `TokenError`."""
    told = own_token()
    if options.token_file is None:
        return told
    token = token_of_file(options.token_file)
    if told not in ("", token):
        raise UsageError(
            f"{VARIABLE} is another token than that in {options.token_file}; unset the variable, or leave"
            " --token-file out"
        )
    return token


def _missing() -> str:
    return " and ".join(name for name in ("zmq", "msgspec") if find_spec(name) is None)


def _set_environment(options: argparse.Namespace) -> None:
    """Sets the environment that the ranks inherit."""
    os.environ[switch.VARIABLE] = "1"
    if reason := switch.autoload_off():
        print(f"unicomm run: torch.distributed stays as it is: {reason}", file=sys.stderr)
    if options.backend is not None:
        os.environ[CHOICE] = options.backend
    if options.run_path and options.start_method == "fork":
        # The ranks are forks of this process, which has loaded torch without the switch.
        config.use_torchcomms = True
        switch.install()
    # The rings of ranks that succeed are evidence about those that fail; the launcher removes them.
    os.environ["UNICOMM_TRACE_KEEP"] = "always"


def _folder(options: argparse.Namespace) -> job_folder.JobFolder:
    if options.trace_dir:
        given, where = options.trace_dir, f"--trace-dir {options.trace_dir}"
    elif given := os.environ.get("UNICOMM_TRACE_DIR"):
        where = f"UNICOMM_TRACE_DIR={given}"
    if given:
        return job_folder.JobFolder(named_folder(Path(given).absolute(), where))
    base = private_folder()
    job_folder.clean(base)
    return job_folder.JobFolder(base)


# --- addresses ----------------------------------------------------------------------------------------


def _choose_addresses(options: argparse.Namespace, several: bool) -> None:
    """Sets this host's address, and whether it hosts the store, from the route to the rendezvous endpoint.

    torchrun uses the host's own name instead, which often resolves to loopback or not at all; then the hosts
    do not find each other. Options of the user are kept; but a job on one host needs no address that other
    hosts reach.
    """
    if not several:
        _stay_on_loopback(options)
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


def _stay_on_loopback(options: argparse.Namespace) -> None:
    """Makes the ranks of a job on one host meet at loopback, unless the user names an address."""
    if options.local_addr is None:
        options.local_addr = LOOPBACK
    if options.rdzv_backend == "static" and (options.rdzv_endpoint or options.master_port is not None):
        if os.environ.get("UNICOMM_STORE_LISTEN") == "all":
            return
        host, port = _endpoint(options)
        if host and not _is_loopback(host):
            options.rdzv_endpoint = f"{LOOPBACK}:{port}"


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
    """Returns this host's address for other hosts; "" if there are none, or if there is no route."""
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


def _hub_settings(options: argparse.Namespace, several: bool, token: str) -> HubSettings | None:
    """Returns how the hub listens (at loopback, unless there are other hosts); None for no hub."""
    if options.hub is False:
        return None
    if missing := _missing():
        if several:
            print(
                f"unicomm run: there is no hub, because {missing} is not installed, so the rings of each host"
                " stay there: pip install 'unicomm[hub]'",
                file=sys.stderr,
            )
        return None
    if not token and not several:
        token = new_token()
    address = options.local_addr if several else None
    port = job_folder.DEFAULT_PORT if options.hub_port is None else options.hub_port
    return HubSettings(token, address or LOOPBACK, port, options.hub_port is None, several)
