"""A headless Chromium, driven through its DevTools protocol over a pipe: real clicks and keys, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Commands that start a Chromium.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
#: Seconds that a page may take to show something.
PATIENCE = 120.0
#: Keys that are pressed by name: their code.
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}

#: The middle of an element in the page, once it has been at one place for three frames.
POINT = """async (element) => {
  element.scrollIntoView({ block: "center" });
  for (let last = "", frames = 0; ; ) {
    const { left, top, width, height } = element.getBoundingClientRect();
    frames = last === `${left} ${top}` ? frames + 1 : 0;
    if (frames === 3) return [left + width / 2, top + height / 2];
    last = `${left} ${top}`;
    await new Promise(requestAnimationFrame);
  }
}"""


def command() -> str | None:
    """The command of a Chromium; None where none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """A page in the browser."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest, self._number, self._session = b"", 0, ""
        #: Errors of the page: exceptions, and messages of its console.
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer["method"] == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(str(answer["params"]["entry"]))

    def _read(self) -> Any:
        while b"\0" not in self._rest:
            assert select.select([self._reading], [], [], PATIENCE)[0], "the browser does not answer"
            self._rest += os.read(self._reading, 2**20)
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, address: str) -> None:
        """Loads an address anew."""
        for each in ("about:blank", address):
            self.call("Page.navigate", url=each)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Gives the page a size in pixels, and a preference for dark or light colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, replMode=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def wait(self, expression: str) -> None:
        """Waits until an expression is true."""
        until = time.monotonic() + PATIENCE
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < until, f"{expression} does not become true; errors: {self.errors}"
            time.sleep(0.05)

    def point(self, selector: str) -> tuple[float, float]:
        """Moves the pointer to the middle of an element, once the layout rests, and gives this place."""
        at = self.value(f"await ({POINT})(document.querySelector({json.dumps(selector)}))")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
        return at[0], at[1]

    def click(self, selector: str) -> None:
        """Clicks at the middle of an element, with whatever lies on top there."""
        x, y = self.point(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, control: bool = False) -> None:
        """Presses a key: one of `KEYS`, or a letter."""
        code = KEYS.get(key, ord(key[0].upper()))
        params: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 2 if control else 0}
        if key == "Enter":
            params["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", code=key if key in KEYS else f"Key{key.upper()}", **params)
        self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    def type(self, text: str) -> None:
        """Types a text, key by key."""
        for character in text:
            if character == "\n":
                self.press("Enter")
            else:
                self.call("Input.dispatchKeyEvent", type="char", text=character)

    def picture(self, file: Path) -> None:
        """Saves what is seen as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """A browser with one page, and a profile of its own in a folder."""
    program = command()
    assert program is not None
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for pipe in (os.pipe(), os.pipe()) for end in pipe]
    to_browser, writing, reading, from_browser = ends

    def connect() -> None:
        os.dup2(to_browser, 3)
        os.dup2(from_browser, 4)

    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    arguments = [program, *options, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    with subprocess.Popen(
        arguments, preexec_fn=connect, pass_fds=(3, 4), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            yield Tab(reading, writing)
        finally:
            process.terminate()
            for end in ends:
                os.close(end)
