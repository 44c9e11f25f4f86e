"""A headless Chromium by chromedriver's own protocol, which is JSON over HTTP."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Browser:
    """One session of a browser."""

    def __init__(self, address: str, session: str) -> None:
        self._base = f"{address}/session/{session}"

    def open(self, url: str) -> None:
        _post(f"{self._base}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns; it may be a promise."""
        return _post(f"{self._base}/execute/sync", {"script": script, "args": list(arguments)})

    def command(self, name: str, **parameters: Any) -> Any:
        """Run a command of Chromium's DevTools protocol."""
        return _post(f"{self._base}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def wait(self, script: str, *arguments: Any, seconds: float = 60) -> Any:
        """The first true value that a script returns. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(script, *arguments):
                return value
            time.sleep(0.2)
        raise TimeoutError(script)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile, and end it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        session = _first_session(address, wanted)
        try:
            yield Browser(address, session)
        finally:
            _send(f"{address}/session/{session}", None, "DELETE")
    finally:
        driver.terminate()
        driver.wait(timeout=20)


def _first_session(address: str, wanted: dict[str, Any]) -> str:
    for _ in range(100):
        try:
            return str(_post(f"{address}/session", wanted)["sessionId"])
        except ConnectionError:
            time.sleep(0.2)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
            time.sleep(0.2)
    raise TimeoutError("chromedriver does not answer")


def _post(url: str, body: Any) -> Any:
    return _send(url, json.dumps(body).encode(), "POST")


def _send(url: str, data: bytes | None, method: str) -> Any:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["value"]
