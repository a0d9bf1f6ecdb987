"""How hubs of several hosts find each other, and a store that keeps the launcher from nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from tests.processes.rank_processes import new_store
from unicomm.launch.run import introduction
from unicomm.launch.run.introduction import HubSettings, Introduction, Listening, Meeting

WITHIN = 60.0  # a hang, not a slow machine


class Hub:
    """Says at once that it listens, and keeps what it is told."""

    gone, pid = False, 1

    def __init__(self, port: int) -> None:
        self.told: list[dict[str, Any]] = []
        self._port = port

    def tell(self, say: str, **more: Any) -> None:
        self.told.append({"say": say, **more})

    def wait(self, *_: str, seconds: float) -> dict[str, Any]:
        return {"say": "open", "address": "127.0.0.1", "port": self._port}


class Silent:
    """A store whose host answers nothing until `answer` is set."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()

    def check(self, *_: Any) -> bool:
        self.asked.set()
        return self.answer.wait(WITHIN / 4)

    set = add = check


def listening(number: int, token: str, folder: Path) -> tuple[Hub, Listening]:
    hub: Any = Hub(1000 + number)
    return hub, Listening(hub, HubSettings(token, "127.0.0.1", 0, any_port=True, several=True), folder)


def begin(store: Any, host: int, token: str, folder: Path, hosts: int = 2) -> tuple[Hub, Introduction]:
    hub, there = listening(host, token, folder)
    return hub, Introduction(there, store, Meeting(host, hosts), f"round{host}")


def go_on(*introductions: Introduction) -> None:
    end = time.monotonic() + WITHIN
    while not all(each.done for each in introductions):
        assert time.monotonic() < end
        for each in introductions:
            each.step()
        time.sleep(0.01)


def test_hosts_learn_of_each_other(tmp_path: Path) -> None:
    server = new_store()
    stores = [server, TCPStore("127.0.0.1", server.port, is_master=False)]
    made = [begin(PrefixStore("job", store), host, "", tmp_path) for host, store in enumerate(stores)]
    go_on(*(introduction for _, introduction in made))
    for hub, _ in made:
        known = hub.told[-1]["directories"]
        assert [(host, address) for host, address, _ in known] == [
            (host, f"tcp://127.0.0.1:{1000 + host}") for host in range(2)
        ]
    tokens = {hub.told[0]["token"] for hub, _ in made}
    assert len(tokens) == 1
    assert len(tokens.pop()) == 32


def test_a_host_without_a_hub_keeps_no_others_apart(tmp_path: Path) -> None:
    """The first one never comes; the token and the other hubs do not depend on it."""
    store = new_store()
    made = [begin(store, host, "", tmp_path, hosts=3) for host in (1, 2)]
    end = time.monotonic() + WITHIN
    while not all(hub.told and len(hub.told[-1].get("directories", [])) == 2 for hub, _ in made):
        assert time.monotonic() < end
        for _, mine in made:
            mine.step()
        time.sleep(0.01)
    for hub, mine in made:
        assert [host for host, _, _ in hub.told[-1]["directories"]] == [1, 2]
        assert not mine.done


def test_a_host_that_joins_later_gets_the_token_of_the_others(tmp_path: Path) -> None:
    """It may even be the first one then."""
    store = new_store()
    hubs = [listening(number, "", tmp_path) for number in range(3)]
    for turn, order in enumerate([[0, 1], [2, 0, 1]]):
        prefix = PrefixStore(f"attempt{turn}", store)
        go_on(
            *(
                Introduction(hubs[number][1], prefix, Meeting(host, len(order), "job"), f"{turn} of {number}")
                for host, number in enumerate(order)
            )
        )
    assert len({there.token for _, there in hubs}) == 1
    assert [[each["say"] for each in hub.told].count("open") for hub, _ in hubs] == [1, 1, 1]


def test_a_restart_with_the_same_prefix_reads_nothing_of_the_attempt_before(tmp_path: Path) -> None:
    store = new_store()
    hubs = [listening(number, "of the job", tmp_path) for number in range(2)]
    for restarts in range(2):
        for hub, _ in hubs:
            hub.told.clear()
        rounds = [f"{restarts} of {host}" for host in range(2)]
        made = [
            Introduction(there, store, Meeting(host, 2, restarts=restarts), rounds[host])
            for host, (_, there) in enumerate(hubs)
        ]
        for _ in range(20):  # one host is earlier than the other
            made[1].step()
            time.sleep(0.01)
        go_on(*made)
        for hub, _ in hubs:
            assert [round for _, _, round in hub.told[-1]["directories"]] == rounds


@pytest.mark.parametrize("token", ["", "of the job"], ids=["to count", "to set a key"])
def test_a_store_that_does_not_answer_holds_no_launcher(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(introduction, "_STARTING", 0.1)
    store = Silent()
    hub, mine = begin(store, 0 if token else 1, token, tmp_path)
    mine.step()
    assert store.asked.wait(WITHIN)
    for _ in range(3):
        mine.step()
    go_on(mine)
    assert not store.answer.is_set()
    assert hub.told[-1]["say"] == "note"
    assert "not introduced: the store did not answer within 0.1 s" in hub.told[-1]["what"]
    assert hub.told[-1]["what"].endswith("the launcher)")  # who holds it, as far as that is known
    store.answer.set()
