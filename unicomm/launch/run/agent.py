"""torchrun's agent, which tells `Job` what happens, and ends the ranks once, whatever signals come.

torch's own signal handler raises wherever the launcher is: between the start of a process and the note of
it, in the middle of ending the ranks, or inside a logging call, which swallows it. Here the first signal
interrupts only the waiting; everything else goes on to its end first (stop_signals.py).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.utils import _PeriodicTimer
from torch.distributed.launcher import api as launcher

from .introduction import Meeting
from .job import Job, runs
from .stop_signals import StopSignals

_HEARTBEAT = 5.0  # seconds that the thread of torch's rendezvous may need to end


def stopped(number: signal.Signals) -> SignalException:
    """The exception by which torchrun's agent ends the ranks with this signal."""
    return SignalException(f"stopped by {number.name}", number)


@contextlib.contextmanager
def our_agent(
    job: Job, stop: StopSignals, on_start: Callable[[], None], on_restart: Callable[[], None]
) -> Iterator[None]:
    """Makes torchrun use our agent, a subclass of its own, and our signal handler.

    `on_start` is called before ranks are started, and `on_restart` before those of a failed attempt are.
    """
    replaced = (
        (vars(launcher), "LocalElasticAgent", _agent_class(job, stop, on_start, on_restart)),
        (vars(multiprocessing), "_terminate_process_handler", stop.handle),
        (vars(dynamic_rendezvous), "_PeriodicTimer", _timer_class(stop)),
    )
    before = [(names, name, names[name]) for names, name, _ in replaced]
    for names, name, value in replaced:
        names[name] = value
    try:
        yield
    finally:
        for names, name, value in before:
            names[name] = value


def _agent_class(
    job: Job, stop: StopSignals, on_start: Callable[[], None], on_restart: Callable[[], None]
) -> type[LocalElasticAgent]:
    class Agent(LocalElasticAgent):
        _restarting = False

        def run(self, role: str = DEFAULT_ROLE) -> Any:
            try:
                return super().run(role)
            finally:
                _end_heartbeat(self._rdzv_handler)

        def _pids(self, worker_group: Any) -> dict[int, int]:
            """The processes of this host's ranks, by rank."""
            pids = self._pcontext.pids() if self._pcontext else {}
            return {worker_group.workers[local].global_rank: pid for local, pid in pids.items()}

        def _meeting(self, worker_group: Any) -> Meeting:
            handler, spec = self._rdzv_handler, worker_group.spec
            # The keys of a static rendezvous are the same in all attempts.
            restarts = spec.max_restarts - self._remaining_restarts
            return Meeting(
                worker_group.group_rank,
                worker_group.group_world_size,
                handler.get_run_id(),
                restarts if handler.get_backend() == "static" else 0,
            )

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            stop.check()
            with stop.deferred():
                on_start()
                job.starting()
                job.attempt.last = self._remaining_restarts <= 0
                try:
                    ids: dict[int, Any] = super()._start_workers(worker_group)
                except OSError as error:
                    if error.filename == worker_group.spec.entrypoint:
                        job.attempt.unstartable = error
                    raise
                job.attempt.pids = self._pids(worker_group)
                job.started(worker_group.store, self._meeting(worker_group))
            return ids

        def _monitor_workers(self, worker_group: Any) -> Any:
            with stop.deferred():
                pids = self._pids(worker_group)
                job.step()
                job.look_at(pids)
                result = super()._monitor_workers(worker_group)
                if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                    # Empty if they have failed since `look_at`: the agent has ended the others meanwhile.
                    job.attempt.ended = job.attempt.ended or _by_themselves(result.failures)
                    job.fail("a rank failed", set(pids.values()) - {f.pid for f in result.failures.values()})
                    if job.attempt.last or self._remaining_restarts <= 0:  # which torch may set to 0 itself
                        stop.ending()  # a signal that came after the failure is not the reason
            return result

        def _restart_workers(self, worker_group: Any) -> None:
            if job.attempt.failure:
                with stop.deferred():
                    on_restart()
            else:
                job.attempt.failure, job.attempt.replaced = "hosts joined or left the job", True
            self._restarting = True
            try:
                super()._restart_workers(worker_group)
            finally:
                self._restarting = False

        def _shutdown(self, *arguments: Any, **more: Any) -> None:
            if not self._restarting:
                stop.ending()
            with stop.deferred():
                if any(runs(pid) for pid in self._pids(self._worker_group).values()):
                    job.fail("the launcher was told to stop")
                super()._shutdown(*arguments, **more)

    return Agent


def _timer_class(stop: StopSignals) -> type[_PeriodicTimer]:
    class Timer(_PeriodicTimer):
        def start(self) -> None:
            with stop.deferred():  # else torch would join a thread that was not started
                super().start()

    return Timer


def _by_themselves(failures: dict[int, Any]) -> dict[int, int]:
    """The exit codes of failed ranks, without those that the agent has ended, if there are others."""
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    ends = (-signal.SIGTERM, -signal.SIGKILL)
    return {rank: code for rank, code in codes.items() if code not in ends} or codes


def _end_heartbeat(handler: Any) -> None:
    """Ends the thread of torch's rendezvous; after a signal it would run into the end of the interpreter."""
    timer = getattr(handler, "_keep_alive_timer", None)
    context, thread = getattr(timer, "_ctx", None), getattr(timer, "_thread", None)
    if context is not None and thread is not None:
        context.stop_event.set()
        thread.join(_HEARTBEAT)
