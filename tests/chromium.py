"""A headless Chromium to try pages in, driven through a pipe: needs no package but the browser itself."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage --disable-extensions --hide-scrollbars --remote-debugging-pipe"
).split()


def find():
    """The browser on this machine, or None; CHROMIUM can name one."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page in a browser of its own; ``errors`` are what it wrote to the console or threw."""

    def __init__(self, program, width=1000, height=900, dark=False, timeout=30):
        self.errors, self.requests = [], []
        self._timeout, self._count, self._rest, self._seen = timeout, 0, b"", []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        flags = [*_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *flags],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session = None
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        # Of a loop of observers a page is told, and nobody else.
        heard = "addEventListener('error', event => console.error(event.message))"
        self._call("Page.addScriptToEvaluateOnNewDocument", source=heard)
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path):
        """Load a file; the seconds until it was loaded and had drawn a frame."""
        self._seen.clear()
        started = time.perf_counter()
        self._call("Page.navigate", url=Path(path).resolve().as_uri())
        while not any(message.get("method") == "Page.loadEventFired" for message in self._seen):
            self._seen.append(self._next(started + self._timeout))
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.perf_counter() - started

    def evaluate(self, expression):
        """The value of a JavaScript expression, a promise's once it is there."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def resize(self, width, height):
        """Give the window another size, as on another device."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def mouse(self, kind, x, y):
        """A mouse event: mouseMoved, mousePressed or mouseReleased."""
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def screenshot(self, path, whole=True):
        """Write what is to be seen as a PNG; the whole page, or the window."""
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self):
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _call(self, method, **parameters):
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.perf_counter() + self._timeout
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._seen.append(answer)

    def _next(self, deadline):
        while b"\0" not in self._rest:
            left = deadline - time.perf_counter()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"the browser did not answer within {self._timeout} s")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise RuntimeError(f"the browser ended with status {self._process.wait()}")
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        self._note(message)
        return message

    def _note(self, message):
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(parameters["args"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
