"""Elastic data-parallel training: ranks are killed and replaced by new processes, and the others go on.

    python examples/elastic.py                                      # 3 ranks, 2 kills
    python examples/elastic.py --ranks 4 --kills 3 --backend gloo

The main process starts the ranks, kills some of them with SIGKILL, starts new ones, and tells all live
processes which of them are the ranks now. In a cluster the scheduler does that. The ranks train a small
network on handwritten digits. A rank that loses a peer, or learns of a new one, calls `reconfigure`; then all
ranks take over the model of the rank with the most steps. At the end the model is the same on all ranks, and
the loss has fallen from stage to stage.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Any

BATCH = 64
EVERY = 10  # steps between two reports
STAGE = 60  # the minimum number of steps in a stage, which is the time between two changes of the ranks
LEARNED = 0.1  # the loss below which it need not fall any further


# --- a rank ------------------------------------------------------------------------------------------------


def say(**what: object) -> None:
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


class Rank:
    """The training in one process, with any number of other ranks."""

    def __init__(self, backend: str) -> None:
        import torch
        from sklearn.datasets import load_digits
        from torch import nn

        import unicomm

        torch.set_num_threads(1)
        torch.manual_seed(0)
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
        test = torch.arange(len(x)) % 5 == 0
        self.x, self.y, self.x_test, self.y_test = x[~test], y[~test], x[test], y[test]
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.velocity = [torch.zeros_like(p) for p in self.model.parameters()]
        self.step = 0
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.comm = unicomm.new_comm(backend, "cpu", name="gradients", enable_reconfigure=True, timeout=60)

    def state(self) -> list[Any]:
        return [*(p.data for p in self.model.parameters()), *self.velocity]

    def catch_up(self) -> None:
        """Takes over model and momentum of the rank with the most steps; a new rank is at step 0."""
        import torch

        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(self.comm.get_size())]
        self.comm.all_gather(steps, torch.tensor([self.step]), async_op=False)
        self.step = int(max(steps))
        root = steps.index(max(steps))
        works = [self.comm.broadcast(tensor, root, async_op=True) for tensor in self.state()]
        for work in works:
            work.wait()

    def train(self) -> None:
        """Trains until this rank or another one has received an order."""
        import torch

        import unicomm

        rank, size = self.comm.get_rank(), self.comm.get_size()
        total, begun = 0.0, True
        while True:
            # The batch is the same for any number of ranks, so that the loss does not depend on it.
            order = torch.Generator().manual_seed(self.step)
            batch = torch.randint(len(self.x), (BATCH,), generator=order)
            mine = batch[rank::size]
            loss = torch.nn.functional.cross_entropy(self.model(self.x[mine]), self.y[mine], reduction="sum")
            self.model.zero_grad()
            (loss / BATCH).backward()
            grads = [p.grad for p in self.model.parameters()]
            news = torch.tensor([loss.item() / BATCH, float(not self.orders.empty())])
            for work in [
                self.comm.all_reduce(t, unicomm.ReduceOp.SUM, async_op=True) for t in [*grads, news]
            ]:
                work.wait()
            with torch.no_grad():
                for p, v, g in zip(self.model.parameters(), self.velocity, grads, strict=True):
                    v.mul_(0.9).add_(g)
                    p.sub_(v, alpha=0.002)
            self.step += 1
            total += float(news[0])
            if begun or self.step % EVERY == 0:
                since = 1 if begun else (self.step - 1) % EVERY + 1
                say(event="step", step=self.step, size=size, rank=rank, loss=total / since)
                total, begun = 0.0, False
            if news[1] > 0:
                return

    def run(self) -> None:
        import torch

        import unicomm

        threading.Thread(target=self.listen, daemon=True).start()
        say(event="handle", handle=self.comm.get_init_handle())
        while True:
            order = self.orders.get()
            while not self.orders.empty():  # only the newest counts
                order = self.orders.get()
            if order["stop"]:
                break
            try:
                self.comm.reconfigure(order["uuid"], order["handles"])
                self.catch_up()
                self.train()
            except (unicomm.PeerLostError, unicomm.AbortedError, unicomm.CommTimeoutError) as error:
                # The next order has the remaining ranks; they repeat the step that failed.
                say(event="lost", ranks=error.culprits, what=error.message)
        with torch.no_grad():
            accuracy = float((self.model(self.x_test).argmax(1) == self.y_test).float().mean())
        weights = b"".join(tensor.numpy().tobytes() for tensor in self.state())
        digest = hashlib.sha256(weights).hexdigest()
        say(event="done", step=self.step, accuracy=accuracy, weights=digest)
        self.comm.finalize()

    def listen(self) -> None:
        for line in sys.stdin:
            self.orders.put(json.loads(line))
        self.orders.put({"stop": True})  # the main process has ended


# --- the main process --------------------------------------------------------------------------------------


class Process:
    def __init__(self, number: int, backend: str, events: queue.SimpleQueue[tuple[Process, Any]]) -> None:
        self.number, self.events = number, events
        self.handle = ""
        command = [sys.executable, __file__, "--rank", "--backend", backend]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with contextlib.suppress(ValueError):  # a killed process may leave half a line
                self.events.put((self, json.loads(line)))
        self.popen.wait()
        self.events.put((self, {"event": "ended", "at": time.monotonic()}))

    def tell(self, **what: object) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended, and its "ended" event follows
            self.popen.stdin.write(json.dumps(what) + "\n")
            self.popen.stdin.flush()


class Conductor:
    """Kills and starts processes, and tells the live ones which of them are the ranks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.events: queue.SimpleQueue[tuple[Process, Any]] = queue.SimpleQueue()
        self.alive: list[Process] = []
        self.started = self.uuid = 0
        self.deadline = time.monotonic() + options.limit
        self.stages: list[dict[str, Any]] = []
        self.times: dict[str, list[float]] = {"after a kill": [], "after a start": []}

    def start(self) -> Process:
        process = Process(self.started, self.options.backend, self.events)
        self.started += 1
        return process

    def next(self) -> tuple[Process, Any]:
        return self.events.get(timeout=max(0.01, self.deadline - time.monotonic()))

    def await_handle(self, wanted: Process) -> None:
        """Waits until a new process can be a rank; the others go on training."""
        while not wanted.handle:
            process, said = self.next()
            if said["event"] == "handle":
                process.handle = said["handle"]
            else:
                self.note(process, said)

    def note(self, process: Process, said: Any) -> None:
        if said["event"] == "step" and said["rank"] == 0 and self.stages:
            stage = self.stages[-1]
            if said["size"] == stage["size"] and said["at"] > stage["began"]:
                stage["steps"].append((said["step"], said["loss"], said["at"]))
        elif said["event"] == "lost":
            print(f"           process {process.number}: {said['what'].splitlines()[0]}", flush=True)
        elif said["event"] == "ended" and process in self.alive:
            raise SystemExit(f"process {process.number} ended by itself: {process.popen.returncode}")

    def regroup(self, why: str, since: float, what: str) -> None:
        """Makes the live processes the ranks, and returns when they have trained for one stage."""
        self.uuid += 1
        began = time.monotonic()
        self.stages.append({"size": len(self.alive), "steps": [], "began": began})
        for process in self.alive:
            process.tell(stop=False, uuid=self.uuid, handles=[p.handle for p in self.alive])
        steps = self.stages[-1]["steps"]
        ranks = f"{len(self.alive)} rank{'s' * (len(self.alive) > 1)}"
        while not steps:
            self.note(*self.next())
        step, loss, at = steps[0]
        if what:
            self.times[what].append(at - since)
        print(
            f"step {step:5}: {why}; {ranks}, loss {loss:.4f}, after {at - since:.3f} s",
            flush=True,
        )
        while steps[-1][0] < step + STAGE:
            self.note(*self.next())
        step, loss, _ = steps[-1]
        print(f"step {step:5}: {ranks}, loss {loss:.4f}", flush=True)

    def run(self) -> list[str]:
        """Runs all kills and replacements. Returns what went wrong."""
        began = time.monotonic()
        self.alive = [self.start() for _ in range(self.options.ranks)]
        for process in self.alive:
            self.await_handle(process)
        self.regroup(f"{len(self.alive)} processes joined", began, "")
        for kill in range(self.options.kills):
            # The first victim is rank 0, which hosts the store.
            victim = self.alive.pop(kill % len(self.alive))
            since = time.monotonic()
            victim.popen.send_signal(signal.SIGKILL)
            self.regroup(f"process {victim.number} was killed and left", since, "after a kill")
            newcomer = self.start()
            self.await_handle(newcomer)
            since = time.monotonic()
            self.alive.insert(kill % (len(self.alive) + 1), newcomer)
            self.regroup(f"process {newcomer.number} joined", since, "after a start")
        return self.finish()

    def finish(self) -> list[str]:
        for process in self.alive:
            process.tell(stop=True)
        done: dict[int, Any] = {}
        while len(done) < len(self.alive):
            process, said = self.next()
            if said["event"] == "done":
                done[process.number] = said
        codes = [process.popen.wait(max(1.0, self.deadline - time.monotonic())) for process in self.alive]
        self.alive = []
        means = [sum(loss for _, loss, _ in s["steps"]) / len(s["steps"]) for s in self.stages]
        accuracy = min(said["accuracy"] for said in done.values())
        print(f"accuracy {accuracy:.1%}; loss of the stages: {', '.join(f'{m:.4f}' for m in means)}")
        for what, seconds in self.times.items():
            if seconds:
                print(f"first step {what}: {', '.join(f'{s:.3f}' for s in seconds)} s")
        wrong = []
        if any(later >= max(earlier, LEARNED) for earlier, later in itertools.pairwise(means)):
            wrong.append("the loss has not fallen from stage to stage")
        if len({said["weights"] for said in done.values()}) != 1:
            wrong.append("the ranks have different models")
        if len({said["step"] for said in done.values()}) != 1:
            wrong.append("the ranks are at different steps")
        if accuracy < 0.7:
            wrong.append("the model has not learned")
        if any(codes):
            wrong.append(f"exit codes {codes}")
        if self.options.result:
            with open(self.options.result, "w") as file:
                sizes = [stage["size"] for stage in self.stages]
                json.dump(
                    {"sizes": sizes, "losses": means, "accuracy": accuracy, "seconds": self.times}, file
                )
        return wrong

    def close(self) -> None:
        for process in self.alive:
            process.popen.kill()
            process.popen.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=3, help="number of ranks (default: 3)")
    parser.add_argument("--kills", type=int, default=2, help="number of kills (default: 2)")
    parser.add_argument("--backend", default="shm", help="shm, gloo or auto (default: shm)")
    parser.add_argument("--limit", type=float, default=300.0, help="time limit in seconds (default: 300)")
    parser.add_argument("--result", help="write the figures to this file, as JSON")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        Rank(options.backend).run()
        return 0
    if options.ranks < 2:
        parser.error("--ranks must be at least 2, because ranks are killed")
    conductor = Conductor(options)
    try:
        wrong = conductor.run()
    except queue.Empty:
        wrong = [f"it was not done within {options.limit:g} s"]
    finally:
        conductor.close()
    print("FAILED: " + "; ".join(wrong) if wrong else "success: no surviving rank had to restart", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
