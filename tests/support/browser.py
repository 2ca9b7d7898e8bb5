"""Headless Chromium, driven by its debugging protocol over a pipe."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a running Chromium.

    Attributes:
        requested: URLs that the page has asked for.
        complaints: errors and warnings of its scripts.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._held, self._id, self._session = to, back, b"", 0, ""
        self.requested, self.complaints = list[str](), list[str]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol and its result."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                self._held += os.read(self._back, 1 << 16)
            line, _, self._held = self._held.partition(b"\0")
            data = json.loads(line)
            if data.get("id") == self._id:
                assert "error" not in data, data
                return dict(data["result"])
            self._note(data)

    def _note(self, data: dict[str, Any]) -> None:
        name, parameters = data.get("method"), data.get("params", {})
        if name == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        elif name == "Runtime.exceptionThrown" or (
            name == "Log.entryAdded" and parameters["entry"]["level"] == "error"
        ):
            self.complaints.append(json.dumps(parameters))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> Any:
        """The first true value of an expression."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def shape(self, width: int, height: int, scheme: str) -> None:
        """Size of the window, and light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str, text: str = "") -> None:
        """A key of the keyboard."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text if kind == "keyDown" else "")

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)


@contextmanager
def browser(profile: Path, webgpu: bool = False) -> Iterator[Browser]:
    """A browser with a fresh profile, on request with WebGPU computed in software."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--no-first-run", f"--user-data-dir={profile}"]
    software = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"]
    flags += software if webgpu else ["--disable-gpu"]
    flags += ["--remote-debugging-pipe", "--disable-background-networking", "--disable-component-update"]

    def connect() -> None:
        held = os.dup(theirs_in), os.dup(theirs_out)
        os.dup2(held[0], 3)
        os.dup2(held[1], 4)

    process = subprocess.Popen(
        [str(CHROMIUM), *flags],
        preexec_fn=connect,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.kill()
        process.wait()
        for each in (theirs_in, ours_out, ours_in, theirs_out):
            os.close(each)
