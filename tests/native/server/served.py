"""Servers for tests: `tilewise serve` with a small model on a free port, shared by the tests of a process."""

import atexit
import contextlib
import ctypes
import functools
import glob
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from native.serve.serving_models import save_model

TALK = [{"role": "user", "content": "hello"}]
PATIENCE_S = 120  # with what no test passes or fails by
_LISTENS = re.compile(r"listening on (\S+?)(?:,|$)")


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_us():
    """In the child: be killed when the parent thread ends, so that a killed worker leaves no server."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Served:
    """A running `tilewise serve`, or a script that serves a model with settings."""

    def __init__(self, model, *options, script=None, settings=None, launch=()):
        self.model = model
        port = () if "--uds" in options else ("--port", "0")
        start = [sys.executable, "-m", "tilewise", *launch]
        command = [*start, "serve", str(model), *port, "--dtype", "f32", *options]
        if script is not None:
            command = [sys.executable, "-c", script, str(model), json.dumps(settings)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_end_with_us)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if match := _LISTENS.search(line):
                self.url = match[1]
                break
        else:
            raise AssertionError("".join(self.log))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])

    def wait_ready(self):
        """Wait until the model is loaded."""

        def is_ready():
            assert self.process.poll() is None, "".join(self.log)
            return self.get("/health")[0] == 200

        until(is_ready, lambda: "".join(self.log))
        return self

    def get(self, path, **headers):
        return self.ask(path, None, **headers)

    def ask(self, path, body, **headers):
        """Status and body of an answer; `body` may be bytes, None for a GET."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        usual = {} if body is None else {"content-type": "application/json"}
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, {**usual, **fields})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, _content(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _content(error)

    def chunks(self, path, body):
        """The data of a stream's events."""
        text = self.ask(path, {**body, "stream": True})[1]
        return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]

    def metric(self, name):
        """The value of a metric without labels except the model's."""
        (line,) = (line for line in self.get("/metrics")[1].splitlines() if line.startswith(f"vllm:{name}{{"))
        return float(line.rsplit(" ", 1)[1])

    def wait_idle(self):
        """Wait until no text runs or waits, so that no blocks are in use."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        until(lambda: not any(self.metric(name) for name in names), "a request or a block is held")

    def children(self):
        """Process ids of the engine, then of the other children of all its threads."""
        return children_of(self.process.pid)

    def wait_end(self):
        """The exit code, after the server has ended and its log is complete."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        return self.process.wait(PATIENCE_S)


def until(holds, reported="it does not hold"):
    """Wait for a condition, with a limit for slow machines."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, reported() if callable(reported) else reported
        time.sleep(0.01)


def children_of(process_id):
    """Process ids of the children of a process, those of its main thread first."""
    first = f"/proc/{process_id}/task/{process_id}/children"
    others = [path for path in glob.glob(f"/proc/{process_id}/task/*/children") if path != first]
    return [int(one) for path in (first, *others) for one in Path(path).read_text().split()]


def _content(answer):
    text = answer.read().decode()
    return json.loads(text) if answer.headers["content-type"] == "application/json" else text


@functools.cache
def small_model():
    """A directory with a model of random weights."""
    folder = tempfile.TemporaryDirectory(prefix="tilewise-served-")
    atexit.register(folder.cleanup)
    return save_model(Path(folder.name) / "llama")


@functools.cache
def usual_server():
    """The server that most tests share."""
    server = Served(
        small_model(), "--served-model-name", "small", "--max-num-seqs", "8", "--max-num-waiting", "64"
    )
    atexit.register(server.close)
    return server.wait_ready()
