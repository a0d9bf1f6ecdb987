"""A headless Chromium for tests of pages, driven by the DevTools protocol over two pipes.

It needs no package: with `--remote-debugging-pipe` it speaks JSON, each message ended by a zero byte, on the
descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)
WHY_NOT = f"no Chromium in PATH ({', '.join(NAMES)})"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class PageError(RuntimeError):
    """A script of the page, or an expression of the test, raised an exception."""


class Browser:
    """One page of a browser of its own.

    `errors` has the exceptions and the console errors of the page's scripts since the page was opened.
    """

    def __init__(self, profile: Path, within: float = 60.0) -> None:
        assert CHROMIUM is not None, WHY_NOT
        self.within, self.errors, self._number, self._rest = within, [], 0, b""
        self._events: list[dict[str, Any]] = []
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # The browser reads from 3 and writes to 4. The ends are copied out of the way of these first.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (commands, answers)]
        moves: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, one, to) for one, to in zip(theirs, (3, 4), strict=True)
        ]
        moves += [(os.POSIX_SPAWN_OPEN, to, os.devnull, os.O_RDWR, 0) for to in (0, 1, 2)]
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=moves, setsid=True)
        for end in (commands, answers, *theirs):
            os.close(end)
        self._session = ""
        target = next(t for t in self._until(self._targets) if t["type"] == "page")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "DOM"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("Target.getTargets")["targetInfos"]
        return found if any(t["type"] == "page" for t in found) else []

    def _until(self, look: Any) -> Any:
        deadline = time.monotonic() + self.within
        while not (found := look()):
            assert time.monotonic() < deadline, "the browser does not answer"
            time.sleep(0.02)
        return found

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result."""
        self._number += 1
        number = self._number
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.within
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        one, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(event["params"]["exceptionDetails"])
        elif event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] == "error":
            self.errors.append(event["params"]["args"])

    def look(self, width: int, height: int = 900, theme: str = "light", motion: bool = True) -> None:
        """Sets the size of the window, and what the system says about colours and motion."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": "no-preference" if motion else "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, path: Path) -> None:
        """Opens a file and waits until it is loaded."""
        self.errors, self._events = [], []
        self.call("Page.navigate", url=path.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self._events):
            self._note(self._next())

    def events(self, method: str) -> list[dict[str, Any]]:
        """Returns the events of a kind since the page was opened."""
        return [event for event in self._events if event.get("method") == method]

    def run(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise PageError(str(done["exceptionDetails"]))
        return done["result"].get("value")

    def listeners(self, expression: str) -> list[str]:
        """Returns the types of the events for which the element of an expression has listeners."""
        found = self.call("Runtime.evaluate", expression=expression)["result"]["objectId"]
        return [
            one["type"] for one in self.call("DOMDebugger.getEventListeners", objectId=found)["listeners"]
        ]

    def key(self, name: str) -> None:
        """Presses and releases a key, such as "Tab" or "ArrowRight"."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}
        text = {"Enter": "\r"}.get(name, name if len(name) == 1 else "")
        key = {"key": name, "code": name, "windowsVirtualKeyCode": codes.get(name, 0), "text": text}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def picture(self, whole: bool = True) -> bytes:
        """Returns a picture of the page as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        return base64.b64decode(data["data"])
