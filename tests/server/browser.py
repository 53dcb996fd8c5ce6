"""A headless Chromium, driven through a pipe by its DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from base64 import b64decode
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
"""The browser, or None where there is none."""

_PATIENCE_S = 20
_LAUNCH = "import os, sys; os.dup2({}, 3); os.dup2({}, 4); os.execv(sys.argv[1], sys.argv[1:])"
"""Starts the browser with the pipes where it looks for them: file descriptors 3 and 4."""


class Browser:
    """One page. To be closed.

    Args:
        profile: an empty folder for its files.
    """

    def __init__(self, profile: Path) -> None:
        ends = (*os.pipe(), *os.pipe())
        # Above 9, so that none is one of those under which the browser looks for them.
        to_read, self._write, self._read, to_write = (
            fcntl(end, F_DUPFD_CLOEXEC, 10) for end in ends
        )
        for end in ends:
            os.close(end)
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH.format(to_read, to_write), *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """What the page wrote to the console, and what the browser refused it."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # at which it ends
        os.close(self._read)
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window and the scheme of colours."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Go to an address and wait until its document is loaded."""
        self._call("Page.navigate", url=address)
        self.wait_for(f"location.href === {address!r} && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Wait until an expression is true; its value."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, f"{script} did not come true"
            time.sleep(0.05)
        return value

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key, such as `Enter` or `ArrowDown`."""
        code = {"Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text,
            )  # fmt: skip

    def picture(self) -> bytes:
        """The window as a PNG."""
        return b64decode(self._call("Page.captureScreenshot")["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            if answer.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled"):
                self.complaints.append(json.dumps(answer["params"]))
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer
