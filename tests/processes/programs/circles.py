"""Ranks that wait for each other through several communicators, and ranks that only seem to.

As a program: circles.py NAME..., three ranks; or `threads NAME...`, one process whose ranks are threads. The
name `legal:SEED` stands for a legal program that follows from the seed. Each
function takes the communicator of three ranks, and one for each pair (`pairs[k]` of the ranks k and k+1).
"""

import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from tests.wait_tables import Looks
from unicomm import CommError, Communicator, ReduceOp, Work
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks

FOR_EVER = 1000.0  # seconds, beyond the tests' own limits
LARGE = 400_000  # elements of a message that does not fit into the transport's own memory
A_WHILE = 0.1  # seconds between two looks at how often the ranks that wait have looked for a circle

Pairs = Sequence[Communicator | None]


def make_pairs(comm: Communicator) -> Pairs:
    me = comm.get_rank()
    members = [sorted((k, (k + 1) % 3)) for k in range(3)]
    return [comm.split(ranks, f"pair {k}") if me in ranks else None for k, ranks in enumerate(members)]


def other(pair: Communicator) -> int:
    return 1 - pair.get_rank()


def around(pairs: Pairs, me: int) -> tuple[Communicator, Communicator]:
    """This rank's communicators with the next one and with the one before."""
    after, before = pairs[me], pairs[me - 1]
    assert after is not None
    assert before is not None
    return after, before


# --- circles ----------------------------------------------------------------------------------------------


def receive_all_around(comm: Communicator, pairs: Pairs, me: int) -> None:
    after, before = around(pairs, me)
    after.recv(torch.ones(1), other(after), False, timeout=FOR_EVER)
    before.send(torch.ones(1), other(before), False)


def send_all_around(comm: Communicator, pairs: Pairs, me: int) -> None:
    after, before = around(pairs, me)
    after.send(torch.ones(LARGE), other(after), False, timeout=FOR_EVER)
    before.recv(torch.ones(LARGE), other(before), False)


def wait_for_works(comm: Communicator, pairs: Pairs, me: int) -> None:
    after, before = around(pairs, me)
    after.recv(torch.ones(1), other(after), True, timeout=FOR_EVER).wait()
    before.send(torch.ones(1), other(before), True).wait()


def messages_of_groups(comm: Communicator, pairs: Pairs, me: int) -> None:
    after, before = around(pairs, me)
    UnicommProcessGroup(after).recv([torch.ones(1)], other(after), 0).wait()
    UnicommProcessGroup(before).send([torch.ones(1)], other(before), 0).wait()


def receive_from_any(comm: Communicator, pairs: Pairs, me: int) -> None:
    after, before = around(pairs, me)
    UnicommProcessGroup(after).recv_anysource([torch.ones(1)], 0).wait()
    before.send(torch.ones(1), other(before), False)


def batches(comm: Communicator, pairs: Pairs, me: int) -> None:
    after, before = around(pairs, me)
    batch = after.batch_op_create()
    batch.send(torch.ones(1), other(after))
    batch.recv(torch.ones(1), other(after))
    batch.issue(False, timeout=FOR_EVER)
    before.barrier(False)


def two_groups_in_two_orders(comm: Communicator, pairs: Pairs, me: int) -> None:
    """Rank 0 has one order, the others the other one."""
    first, second = (comm, twins[me]) if me == 0 else (twins[me], comm)
    first.barrier(False, timeout=FOR_EVER)
    second.barrier(False, timeout=FOR_EVER)


def a_message_and_a_collective(comm: Communicator, pairs: Pairs, me: int) -> None:
    """Rank 2 has gone on to the collective, for which rank 0 waits in a receive, and so has rank 1."""
    if me == 0:
        after, _ = around(pairs, 0)
        after.recv(torch.ones(1), other(after), False, timeout=FOR_EVER)
    comm.all_reduce(torch.ones(9), ReduceOp.SUM, False, timeout=FOR_EVER)


CIRCLES: dict[str, Callable[[Communicator, Pairs, int], None]] = {
    f.__name__: f
    for f in (
        receive_all_around,
        send_all_around,
        wait_for_works,
        messages_of_groups,
        receive_from_any,
        batches,
        two_groups_in_two_orders,
        a_message_and_a_collective,
    )
}
INVOLVED = {"a_message_and_a_collective": (0, 1), "two_groups_in_two_orders": (0, 1)}  # else all

twins: dict[int, Communicator] = {}  # a second communicator of all three


def run_circle(name: str, comm: Communicator) -> None:
    """Raises what the circle raises."""
    pairs = make_pairs(comm)
    twin = comm.split([0, 1, 2], "twin")
    assert twin is not None
    twins[comm.get_rank()] = twin
    CIRCLES[name](comm, pairs, comm.get_rank())


# --- no circles -------------------------------------------------------------------------------------------
# Rank 0 waits in one communicator for rank 1, and that one in another one for another thread of rank 0.


# What it waits for is done once these two, and whoever else waits, have looked for a circle long enough.


def looks(waits: int = 2) -> Looks:
    return Looks(waits, pids)


def a_while(waits: int = 2) -> None:
    looks(waits).wait()


def after_a_while(act: Callable[[], object]) -> None:
    """`act` is called by a timer."""
    looked = looks()

    def perhaps() -> None:
        if looked.enough():
            act()
        else:
            threading.Timer(A_WHILE, perhaps).start()

    threading.Timer(A_WHILE, perhaps).start()


def cross(comm: Communicator, pairs: Pairs, me: int, help_out: Callable[[Callable[[], None]], None]) -> None:
    pair = pairs[0]
    if pair is None:
        return
    if me == 0:
        help_out(lambda: pair.send(torch.ones(1), other(pair), False) and None)
        comm.recv(torch.ones(1), 1, False, timeout=FOR_EVER)
    else:
        pair.recv(torch.ones(1), other(pair), False, timeout=FOR_EVER)
        comm.send(torch.ones(1), 0, False)


def a_new_thread(comm: Communicator, pairs: Pairs, me: int) -> None:
    def help_out(act: Callable[[], None]) -> None:
        threading.Thread(target=lambda: (a_while(), act())).start()

    cross(comm, pairs, me, help_out)


def a_timer(comm: Communicator, pairs: Pairs, me: int) -> None:
    cross(comm, pairs, me, after_a_while)


def an_idle_executor(comm: Communicator, pairs: Pairs, me: int) -> None:
    """Its thread is there, and has never called a communicator; another one gives it something to do."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        done = threading.Event()

        def help_out(act: Callable[[], None]) -> None:
            after_a_while(lambda: pool.submit(lambda: (act(), done.set())))

        cross(comm, pairs, me, help_out)
        assert me != 0 or done.wait(FOR_EVER)


def an_event(comm: Communicator, pairs: Pairs, me: int) -> None:
    """A thread waits for an event without a limit; rank 2 sets it, if it is a thread here, else a timer."""
    event = events.setdefault(comm.get_uid(), threading.Event())

    def help_out(act: Callable[[], None]) -> None:
        threading.Thread(target=lambda: (event.wait(), act())).start()
        if not ranks_are_threads:
            after_a_while(event.set)

    cross(comm, pairs, me, help_out)
    if me == 2 and ranks_are_threads:
        a_while()
        event.set()


def a_callback(comm: Communicator, pairs: Pairs, me: int) -> None:
    """An asynchronous message of rank 2 comes late; what is called then helps."""
    from_2 = pairs[2]

    def help_out(act: Callable[[], None]) -> None:
        assert from_2 is not None
        work = from_2.recv(torch.ones(1), other(from_2), True, timeout=FOR_EVER)
        work.add_done_callback(lambda _: act())

    cross(comm, pairs, me, help_out)
    if me == 2:
        a_while()
        assert from_2 is not None
        from_2.send(torch.ones(1), other(from_2), False)


def whoever_joins_for_some_time(comm: Communicator, pairs: Pairs, me: int) -> None:
    """The thread that waits is another one than the one that helps."""
    pair = pairs[0]
    if pair is None:
        return
    if me == 1:
        pair.recv(torch.ones(1), other(pair), False, timeout=FOR_EVER)
        comm.send(torch.ones(1), 0, False)
        return
    waits = threading.Thread(target=lambda: comm.recv(torch.ones(1), 1, False, timeout=FOR_EVER))
    waits.start()
    looked = looks()
    while not looked.enough():
        waits.join(A_WHILE)
    pair.send(torch.ones(1), other(pair), False)
    waits.join()


def a_late_rank(comm: Communicator, pairs: Pairs, me: int) -> None:
    """All wait in a chain at whose end one is only late."""
    after, before = around(pairs, me)
    if me == 2:
        a_while()
    else:
        after.recv(torch.ones(1), other(after), False, timeout=FOR_EVER)
    if me > 0:
        before.send(torch.ones(1), other(before), False)


def a_message_that_joins(comm: Communicator, pairs: Pairs, me: int) -> None:
    """All have asked for a message; what sends them is called while these are under way."""
    after, before = around(pairs, me)
    works = [UnicommProcessGroup(after).recv([torch.ones(1)], other(after), 0)]
    looks(3).wait(over=works[0].is_completed)  # then another rank has waited for enough looks
    works.append(UnicommProcessGroup(before).send([torch.ones(1)], other(before), 0))
    for work in works:
        work.wait()


def legal_program(seed: int, comm: Communicator, pairs: Pairs, me: int) -> None:
    """Everybody runs its part of one sequence, and stops now and then before some of it.

    Some parts run in another thread, which has its turn at the end, or are waited for later.
    """
    rng = random.Random(seed)
    works: list[Work] = []
    for _ in range(25):
        kind, who, slow, how = (rng.randrange(n) for n in (4, 3, 3, 8))
        delay = rng.choice([0.0, 0.05, 0.1, 0.15, 0.2, 0.3])
        if me == slow:
            threading.Event().wait(delay)
        later = how == 0 and kind > 0
        part: Callable[[], Work | None] | None = None
        if kind == 0:
            part = partial(comm.all_reduce, torch.ones(5), ReduceOp.SUM, False, timeout=FOR_EVER)
        elif (pair := pairs[who]) is not None:
            if kind == 1:
                part = partial(pair.barrier, later, timeout=FOR_EVER)
            elif pair.get_rank() == kind - 2:
                part = partial(pair.send, torch.ones(LARGE), other(pair), later, timeout=FOR_EVER)
            else:
                part = partial(pair.recv, torch.ones(LARGE), other(pair), later, timeout=FOR_EVER)
        if part is None:
            continue
        if how == 1 and not later:
            thread = threading.Thread(target=part)
            thread.start()
            thread.join()
        else:
            work = part()
            works += [work] if later and work is not None else []
        if how == 2:
            for work in works:
                work.wait()
            works.clear()
    for work in works:
        work.wait()


def a_legal_program(comm: Communicator, pairs: Pairs, me: int) -> None:
    legal_program(5, comm, pairs, me)


NO_CIRCLES: dict[str, Callable[[Communicator, Pairs, int], None]] = {
    f.__name__: f
    for f in (
        a_new_thread,
        a_timer,
        an_idle_executor,
        an_event,
        a_callback,
        whoever_joins_for_some_time,
        a_late_rank,
        a_message_that_joins,
        a_legal_program,
    )
}

ranks_are_threads = True
pids: list[int] = []  # of all ranks; empty if they are threads
events: dict[str, threading.Event] = {}


def run_no_circle(name: str, comm: Communicator) -> None:
    pairs = make_pairs(comm)
    if name.startswith("legal:"):
        legal_program(int(name.partition(":")[2]), comm, pairs, comm.get_rank())
    else:
        NO_CIRCLES[name](comm, pairs, comm.get_rank())
    comm.barrier(False, timeout=FOR_EVER)


def caught(name: str, comm: Communicator) -> BaseException:
    try:
        run_circle(name, comm)
    except CommError as error:
        return error
    raise AssertionError(f"{name}: nothing was raised")


def main() -> None:
    global ranks_are_threads
    import sys

    import unicomm
    from tests.processes.programs.common import describe, reporting, say

    if sys.argv[1] == "threads":
        for name in sys.argv[2:]:
            if name in CIRCLES:
                found = run_ranks(lambda comm, name=name: caught(name, comm), 3, timeout=40)
                say("errors", errors=[describe(error) for error in found])
            else:
                run_ranks(lambda comm, name=name: run_no_circle(name, comm), 3, timeout=40)
                say("done")
        return
    ranks_are_threads = False
    with unicomm.new_comm("shm", torch.device("cpu"), name="pids", timeout=FOR_EVER) as comm:
        pids.extend([0] * comm.get_size())
        unicomm.objcol.all_gather_object(comm, pids, os.getpid())
    for name in sys.argv[1:]:
        comm = unicomm.new_comm("shm", torch.device("cpu"), name=name, timeout=FOR_EVER)
        with reporting():
            (run_circle if name in CIRCLES else run_no_circle)(name, comm)
    # A rank that is told of a deadlock must not find that another member's process has ended meanwhile.
    unicomm.new_comm("shm", torch.device("cpu"), name="end", timeout=FOR_EVER).barrier(False)


if __name__ == "__main__":
    main()
