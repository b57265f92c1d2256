"""The production setup of docs/serving.md: systemd unit, container file and proxy, as far as this
machine can run them.
"""

import http.client
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import typer

from native.server.served import Served, small_model
from tilewise.cli.main import app
from tilewise.server import ServerSettings

PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text("utf-8")


def block(language):
    """The only code block of a language."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return block


def needs(program):
    """The path of a program; skips the test without it."""
    place = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if place is None:
        pytest.skip(f"there is no {program} on this machine")
    return place


def parse_serve(words):
    """The options of a `tilewise serve` command line as the command parses them."""
    assert words[:2] == ["tilewise", "serve"]
    command = typer.main.get_command(app).commands["serve"]
    return command.make_context("serve", words[2:]).params


def test_the_units_command_is_valid():
    """Its options exist; its socket is in the unit's runtime directory, its keys where the unit loads them."""
    lines = dict(line.split("=", 1) for line in block("ini").splitlines() if "=" in line)
    words = shlex.split(lines["ExecStart"])
    settings = parse_serve(["tilewise", *words[1:]])
    assert str(settings["uds"]).startswith(f"/run/{lines['RuntimeDirectory']}/")
    assert str(settings["api_key_file"]) == f"%d/{lines['LoadCredential'].split(':')[0]}"
    assert int(lines["TimeoutStopSec"]) > ServerSettings().shutdown_timeout_s


@pytest.mark.slow
def test_systemd_accepts_the_unit(tmp_path):
    """`systemd-analyze verify` reports only that nothing is installed here."""
    program = needs("systemd-analyze")
    unit = tmp_path / "tilewise.service"
    unit.write_text(block("ini").replace("/usr/local/bin/tilewise", shutil.which("true")))
    done = subprocess.run([program, "verify", "--man=no", unit], capture_output=True, text=True, timeout=120)
    ours = [line for line in done.stderr.splitlines() if "tilewise" in line]
    assert not ours and done.returncode == 0, done.stderr
    unit.write_text(unit.read_text().replace("MemoryMax=90%", "MemoryMax=much"))
    wrong = subprocess.run([program, "verify", "--man=no", unit], capture_output=True, text=True, timeout=120)
    assert "memory limit" in wrong.stderr


def test_the_container_file_is_valid():
    """Its steps are valid, the wheel is built from the source tree because no package is published,
    entry point and arguments are one command line, and it listens on the exposed port.
    """
    steps = [line.split(" ", 1) for line in block("dockerfile").splitlines() if line]
    build, steps = steps[:4], steps[4:]
    assert [name for name, _ in build] == ["FROM", "RUN", "COPY", "RUN"]
    assert build[0][1].removesuffix(" AS build") == steps[0][1] and build[2][1] == ". /source"
    wheels = re.fullmatch(r"pip wheel .*--wheel-dir (\S+) /source", build[3][1])[1]
    assert [name for name, _ in steps] == ["FROM", "COPY", "RUN", "USER", "EXPOSE", "ENTRYPOINT", "CMD"]
    instructions = dict(steps)
    assert instructions["COPY"] == f"--from=build {wheels} {wheels}"
    assert f"pip install --no-cache-dir --no-index --find-links {wheels} tilewise " in instructions["RUN"]
    settings = parse_serve([*json.loads(instructions["ENTRYPOINT"]), *json.loads(instructions["CMD"])])
    assert str(settings["port"]) == instructions["EXPOSE"] and settings["host"] == "0.0.0.0"
    made = re.search(r"useradd .*?(\S+)$", instructions["RUN"])
    assert made[1] == instructions["USER"]
    assert tuple(map(int, re.search(r"python:(\d+)\.(\d+)", instructions["FROM"]).groups())) >= (3, 10)


@pytest.mark.slow
def test_nginx_passes_streams_on(tmp_path):
    """Behind the page's proxy an answer arrives chunk by chunk: the first before the last is
    generated; the proxy rejects too large bodies itself.
    """
    program = needs("nginx")
    place, logs = tmp_path / "socket", tmp_path / "logs"
    logs.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    locations = block("nginx").replace("/run/tilewise/socket", str(place))
    temporary = "".join(
        f"{kind}_temp_path {logs}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.getuid() == 0 else ""  # of those who may read a test's folder
    (tmp_path / "nginx.conf").write_text(
        f"{user} daemon off; pid {tmp_path}/pid; error_log {logs}/error;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}server {{\nlisten 127.0.0.1:{port};\n{locations}}}\n}}\n"
    )
    command = [program, "-p", tmp_path, "-c", tmp_path / "nginx.conf"]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    server = Served(small_model(), "--uds", str(place), "--served-model-name", "small")
    proxy = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(500):
            status = _ask(port, "/v1/models")[0]
            if status == 200:
                break
            time.sleep(0.02)
        assert status == 200
        body_of_stream = {
            "model": "small",
            "prompt": "x",
            "max_tokens": 240,
            "ignore_eos": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(
            "POST", "/v1/completions", json.dumps(body_of_stream), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        sizes = []
        while piece := answer.read1(1 << 16):
            sizes.append(len(piece))
        connection.close()
        assert answer.status == 200 and len(sizes) > 20
        assert _ask(port, "/v1/completions", b"x" * (9 << 20))[0] == 413
        assert _ask(port, "/metrics")[0] == 404  # the page's proxy hands on what is below /v1/ alone
    finally:
        proxy.terminate()
        proxy.wait(30)
        assert server.close() == 0


def _ask(port, path, body=None):
    """Status and body; (0, b"") without a listener."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(
            "GET" if body is None else "POST", path, body, {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()
