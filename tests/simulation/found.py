"""Programs that showed a defect before its repair, shrunk. Tests play them under several schedules."""

from __future__ import annotations

from .program import Program

_BARRIER = {"op": "coll", "kind": "barrier", "root": 0, "count": 1, "later": False}

FOUND: dict[str, Program] = {
    "a rank that was stopped at its deadline calls another one silent, whose answer it has not read": {
        "ranks": 2,
        "host": -1,
        "schedule": 421,
        "ops": [
            {"op": "create", "comm": "c1", "name": "b", "timeout": 10.0, "reconf": False},
            {"op": "late", "comm": "c1", "rank": 0, "seconds": 8.0},
            {**_BARRIER, "comm": "c1", "root": 1, "timeout": 5.0},
        ],
        "faults": [{"kind": "stop", "rank": 1, "op": 1, "after": 9, "seconds": 8.0}],
    },
    "a rank that cannot reach a dead one while connecting names nobody": {
        "ranks": 3,
        "host": 2,
        "schedule": 17,
        "ops": [{"op": "create", "comm": "c1", "name": "b", "timeout": 10.0, "reconf": False}],
        "faults": [{"kind": "kill", "rank": 1, "op": 0, "after": 76}],
    },
    "a rank that waits for a cause beyond its deadline is blamed itself": {
        "ranks": 4,
        "host": -1,
        "schedule": 1115,
        "ops": [{"op": "create", "comm": "c1", "name": "b", "timeout": 3.0, "reconf": False}],
        "faults": [{"kind": "kill", "rank": 2, "op": 0, "after": 97}],
    },
    "a rank that has finalized after its messages is blamed for the death of another": {
        "ranks": 4,
        "host": -1,
        "schedule": 1926,
        "ops": [
            {"op": "create", "comm": "c1", "name": "a", "timeout": 10.0, "reconf": False},
            {
                "op": "msgs",
                "comm": "c1",
                "sends": [[1, 3, 0, 5]],
                "any": False,
                "order": 91,
                "timeout": 3.0,
            },
            {"op": "batch", "comm": "c1", "sends": [[1, 2, 0, 1], [1, 0, 0, 5]], "timeout": 3.0},
        ],
        "faults": [{"kind": "kill", "rank": 2, "op": 1, "after": 1}],
    },
    "a first rank that is connected at its deadline ends the store before all have read the outcome": {
        "ranks": 3,
        "host": -1,
        "schedule": 1595094849,
        "ops": [
            {"op": "create", "comm": "c1", "name": "a", "timeout": 10.0, "reconf": True},
            {"op": "reconf", "comm": "c1", "uuid": 2, "ranks": [1, 2, 0], "timeout": 3.0},
            {**_BARRIER, "comm": "c1", "root": 1, "timeout": 3.0},
            {"op": "reconf", "comm": "c1", "uuid": 3, "ranks": [0, 1, 2], "timeout": 3.0},
        ],
        "faults": [],
    },
    "messages that a thread posts while another one finalizes go to a worker that has been closed": {
        "ranks": 2,
        "host": -1,
        "schedule": 3007,
        "ops": [
            {"op": "create", "comm": "c1", "name": "a", "timeout": 5.0, "reconf": False},
            {"op": "later", "comm": "c1", "do": "finalize", "rank": 1, "after": 0.01},
            {
                "op": "coll",
                "comm": "c1",
                "kind": "all_reduce",
                "root": 0,
                "count": 0,
                "later": True,
                "timeout": 3.0,
            },
            {
                "op": "msgs",
                "comm": "c1",
                "sends": [[0, 1, 0, 5], [0, 1, 0, 1], [0, 1, 0, 5], [1, 0, 1, 5]],
                "any": False,
                "order": 585,
                "timeout": 5.0,
            },
        ],
        "faults": [],
    },
    "a rank for which the store did not answer meets its own post at the next attempt": {
        "ranks": 2,
        "host": 1,
        "schedule": 3007,
        "ops": [
            {"op": "create", "comm": "c1", "name": "a", "timeout": 10.0, "reconf": False},
            {"op": "create", "comm": "c2", "name": "a", "timeout": 5.0, "reconf": True},
        ],
        "faults": [{"kind": "stop", "rank": 1, "op": 0, "after": 86, "seconds": 30.0}],
    },
    "ranks that wait in messages for a late rank are named with it": {
        "ranks": 4,
        "host": -1,
        "schedule": 10001198,
        "ops": [
            {"op": "create", "comm": "c1", "name": "a", "timeout": 10.0, "reconf": False},
            {"op": "late", "comm": "c1", "rank": 2, "seconds": 8.0},
            {
                "op": "msgs",
                "comm": "c1",
                "sends": [[2, 0, 0, 1], [2, 3, 0, 5]],
                "any": False,
                "order": 0,
                "timeout": 3.0,
            },
            {
                "op": "coll",
                "comm": "c1",
                "kind": "barrier",
                "root": 5,
                "count": 1,
                "later": False,
                "timeout": 3.0,
            },
        ],
        "faults": [],
    },
    "ranks that wait in messages for a stopped rank are named with it": {
        "ranks": 3,
        "host": -1,
        "schedule": 2007,
        "ops": [
            {"op": "create", "comm": "c1", "name": "a", "timeout": 3.0, "reconf": False},
            {"op": "msgs", "comm": "c1", "sends": [[1, 2, 0, 5]], "any": False, "order": 117, "timeout": 5.0},
            {
                "op": "msgs",
                "comm": "c1",
                "sends": [[1, 2, 0, 5]],
                "any": False,
                "order": 726,
                "timeout": 10.0,
            },
            {
                "op": "coll",
                "comm": "c1",
                "kind": "barrier",
                "root": 1,
                "count": 1,
                "later": False,
                "timeout": 5.0,
            },
        ],
        "faults": [{"kind": "stop", "rank": 1, "op": 1, "after": 30, "seconds": 30.0}],
    },
    "a rank that is stopped in its finalize does not wait for its own thread": {
        "ranks": 2,
        "host": -1,
        "schedule": 700173,
        "ops": [
            {"op": "create", "comm": "c1", "name": "b", "timeout": 3.0, "reconf": False},
            {**_BARRIER, "comm": "c1", "root": 1, "later": True, "timeout": 3.0},
            {"op": "later", "comm": "c1", "do": "finalize", "rank": 0, "after": 0.01},
            {"op": "late", "comm": "c1", "rank": 1, "seconds": 0.05},
            {**_BARRIER, "comm": "c1", "root": 1, "timeout": 5.0},
            {**_BARRIER, "comm": "c1", "timeout": 10.0},
        ],
        "faults": [{"kind": "stop", "rank": 0, "op": 5, "after": 1, "seconds": 30.0}],
    },
    "a rank of a split may be killed as soon as it is connected": {
        "ranks": 6,
        "host": -1,
        "schedule": 20003056,
        "ops": [
            {"op": "create", "comm": "c1", "name": "a", "timeout": 5.0, "reconf": True},
            {
                **_BARRIER,
                "comm": "c1",
                "kind": "broadcast",
                "root": 3,
                "count": 50,
                "later": True,
                "timeout": 5.0,
            },
            {"op": "reconf", "comm": "c1", "uuid": 2, "ranks": [4, 1], "timeout": 3.0},
            {"op": "split", "comm": "c1", "parts": [[1, 0]], "child": "c3", "timeout": 3.0},
            {"op": "cause", "comm": "c1", "knows": [0, 1]},
        ],
        "faults": [
            {"kind": "kill", "rank": 4, "op": 4, "after": 6},
            {"kind": "stop", "rank": 3, "op": 4, "after": 417, "seconds": 0.7},
        ],
    },
    "the judge: a receive from any rank names idle ranks, also to a rank that is in earlier messages": {
        "ranks": 4,
        "host": -1,
        "schedule": 3007,
        "ops": [
            {"op": "create", "comm": "c1", "name": "a", "timeout": 3.0, "reconf": False},
            {"op": "late", "comm": "c1", "rank": 1, "seconds": 2.0},
            {
                "op": "msgs",
                "comm": "c1",
                "sends": [[1, 3, 1, 1]],
                "any": False,
                "order": 123,
                "timeout": 3.0,
            },
            {"op": "msgs", "comm": "c1", "sends": [[3, 2, 0, 1]], "any": True, "order": 390, "timeout": 3.0},
        ],
        "faults": [{"kind": "stop", "rank": 1, "op": 1, "after": 1, "seconds": 30.0}],
    },
}
