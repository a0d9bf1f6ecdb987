"""A live worker as its parent sees it: the process, and a thread that receives its messages and output."""

from __future__ import annotations

import codecs
import contextlib
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from .channel import Channel, pair

# Sets the parent's search path before the first import, so that the worker finds the same modules. The
# worker does not run the parent's program.
_START = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    "from unicomm.launch.notebook.rank_worker import main; main(sys.argv[1:])"
)
_CHUNK = 1 << 16
_MOST = 20000  # events that may wait to be shown; further output is dropped

Event = tuple[Any, ...]  # rank, what, more


class WorkerProcess:
    """One worker process. Its messages go into the queue `events`, as (rank, kind, ...).

    The kinds are "text" (stream, text) for output; "ready" (pid), "broken", "done", "failed" and "where" as
    rank_worker.py sends them; and at the end "ended" (exit code, negative for a signal). Output that was
    written before an answer comes before it.
    """

    def __init__(
        self,
        rank: int,
        env: Mapping[str, str],
        modules: Sequence[str],
        events: queue.SimpleQueue[Event],
    ) -> None:
        mine, theirs = pair()
        # The worker ends when the last writer of this pipe is gone; this process is the only writer.
        reader, self._writer = os.pipe()
        self.rank = rank
        self.ended: int | None = None
        self._events = events
        self._dropped = 0
        self._channel = Channel(mine)
        command = [sys.executable, "-c", _START, "\n".join(sys.path), str(theirs.fileno()), str(reader)]
        try:
            self._process = subprocess.Popen(
                [*command, *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno(), reader],
                env=dict(env),
                start_new_session=True,  # Ctrl-C in the terminal goes to the parent, which forwards it
            )
        except BaseException:
            os.close(self._writer)
            raise
        finally:
            theirs.close()
            os.close(reader)
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._hear, name=f"unicomm-rank-{rank}", daemon=True)
        self._thread.start()

    def send(self, *message: Any) -> None:
        """Sends a message. A worker that does not accept all of it is killed."""
        try:
            self._channel.send(*message)
        except OSError:
            self.kill()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kills the worker and all processes that it has started."""
        if self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def join(self, seconds: float | None = None) -> bool:
        """Waits up to `seconds` for the end of the worker; returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        outputs = {
            stream.fileno(): (name, codecs.getincrementaldecoder("utf-8")("replace"))
            for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr))
        }
        for output in outputs:
            os.set_blocking(output, False)
        # The pidfd tells the worker's end. The channel may not, because its forks may hold it open.
        process = os.pidfd_open(self.pid)
        with selectors.DefaultSelector() as selector:
            sources: list[Any] = [self._channel, process, *outputs]
            for source in sources:
                selector.register(source, selectors.EVENT_READ)

            def read(output: int) -> bool:
                name, decoder = outputs[output]
                try:
                    data = os.read(output, _CHUNK)
                except BlockingIOError:
                    return False
                if text := decoder.decode(data, final=not data):
                    self._tell_text(name, text)
                return bool(data)

            def read_all() -> None:
                for output in outputs:
                    while read(output):
                        pass

            alive = True
            while alive:
                ready: list[Any] = [key.fileobj for key, _ in selector.select()]
                alive = process not in ready
                for output in [source for source in ready if source in outputs]:
                    if not read(output):
                        selector.unregister(output)
                if self._channel in ready:
                    message = self._channel.receive()
                    if message is None:
                        selector.unregister(self._channel)
                        self.kill()  # unusable without its channel
                    else:
                        read_all()
                        self._events.put((self.rank, *message))
                        alive = True  # there may be another one
            read_all()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still that of the worker
        self.ended = self._process.wait()
        for descriptor in (self._process.stdout, self._process.stderr, self._channel):
            descriptor.close()
        for number in (process, self._writer):
            os.close(number)
        self._events.put((self.rank, "ended", self.ended))

    def _tell_text(self, stream: str, text: str) -> None:
        if self._events.qsize() > _MOST:  # nothing reads the events: a thread prints between two runs
            self._dropped += len(text)
            return
        if self._dropped:
            text = f"({self._dropped} characters were dropped)\n{text}"
            self._dropped = 0
        self._events.put((self.rank, "text", stream, text))
