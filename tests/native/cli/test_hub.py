"""Models by hub name: a small hub on loopback, its cache, and its errors."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from native.models.families import CASES
from support.gguf_models import small_model, write_model
from tilewise.checkpoint import find_model
from tilewise.core import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CALL = """
import sys
from tilewise.checkpoint import find_model
from tilewise.core import TilewiseError
try:
    print(find_model(*sys.argv[1:]))
except TilewiseError as error:
    print(type(error).__name__, error)
"""


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that downloads need."""

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body):
        repositories, asked = self.server.repositories, self.server.asked
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            files = repositories.get("/".join(parts[2:4]))
            revision = parts[5] if len(parts) > 5 else "main"
            if files is None or revision not in ("main", "v1", COMMIT):
                return self._send(
                    404, b"{}", {"X-Error-Code": "RevisionNotFound" if files else "RepoNotFound"}, with_body
                )
            if parts[4:5] == ["tree"]:
                tree = [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(content),
                        "oid": hashlib.sha1(content).hexdigest(),
                    }
                    for name, content in files.items()
                ]
                body = json.dumps(tree).encode()
                return self._send(200, body, {"Content-Type": "application/json"}, with_body)
            siblings = [{"rfilename": name} for name in files]
            content = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings, "private": False}
            return self._send(
                200, json.dumps(content).encode(), {"Content-Type": "application/json"}, with_body
            )
        files, name = repositories.get("/".join(parts[:2]), {}), "/".join(parts[4:])
        if name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        if with_body:
            asked.append(name)
        tag = hashlib.sha256(files[name]).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return self._send(200, files[name], headers, with_body)

    def _send(self, status, body, headers, with_body):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """Repositories on a server, and a function that calls `find_model` in its own process with an empty cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repositories, server.asked = {}, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def call(*arguments, **environment):
        names = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache")}
        plain = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and not k.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", CALL, *arguments],
            env={**plain, **names, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        )
        return done.stdout.strip()

    yield server, call
    server.shutdown()
    server.server_close()
    thread.join()


def files_of(directory):
    """File contents by name."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_model_is_downloaded_once(hub, tmp_path):
    """Only configuration and one copy of the weights are downloaded; afterwards the cache is
    enough, also offline.
    """
    server, call = hub
    CASES[0].model().save_pretrained(tmp_path / "model", max_shard_size="60KB")
    files = files_of(tmp_path / "model")
    others = ["consolidated.safetensors", "pytorch_model.bin", "modeling.py", "onnx/model.onnx"]
    server.repositories["some/model"] = {**files, **dict.fromkeys(others, b"x")}
    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    path = call("some/model")
    assert files_of(Path(path)) == {n: c for n, c in files.items() if n != "README.md"}
    assert not set(server.asked) & set(others)
    server.asked.clear()
    assert call("some/model", HF_HUB_OFFLINE="1") == path and not server.asked
    assert call("some/model", "v1") == path


@pytest.mark.slow
def test_gguf_files_are_named_by_their_quantisation(hub, tmp_path):
    """Only the file or the parts of this quantisation are downloaded; without a name, several are listed."""
    server, call = hub
    write_model(tmp_path / "m.gguf", small_model("llama"), lambda name, values: Kind.Q8_0)
    write_model(tmp_path / "p.gguf", small_model("llama"), lambda name, values: Kind.F16, max_tensors=5)
    whole = (tmp_path / "m.gguf").read_bytes()
    parts = {path.name: path.read_bytes() for path in sorted(tmp_path.glob("p-*.gguf"))}
    server.repositories["some/one"] = {"README.md": b"", "one-q8_0.gguf": whole, "mmproj-one-Q8_0.gguf": b"x"}
    server.repositories["some/quantised"] = {
        "m-Q4_K_M.gguf": whole,
        "m-Q4_K_S.gguf": b"x",
        **{f"F16/{name.replace('p-', 'm-F16-')}": content for name, content in parts.items()},
    }
    assert call("some/one").endswith("one-q8_0.gguf") and call("some/one:Q8_0") == call("some/one")
    server.repositories["some/both"] = {"config.json": b"{}", "m.Q8_0.gguf": whole}
    assert call("some/both").endswith("/m.Q8_0.gguf")
    server.asked.clear()
    assert call("some/quantised:q4_k_m").endswith("/m-Q4_K_M.gguf") and server.asked == ["m-Q4_K_M.gguf"]
    server.asked.clear()
    place = Path(call("some/quantised:F16"))
    assert place.name == next(iter(parts)).replace("p-", "m-F16-") and len(server.asked) == len(parts) > 1
    assert call("some/quantised:F16", HF_HUB_OFFLINE="1") == str(place)
    assert call("some/quantised:m-Q4_K_M.gguf") == call("some/quantised:Q4_K_M")
    assert "with F16, Q4_K_M, Q4_K_S; give some/quantised:F16" in call("some/quantised")
    assert "got 'Q5_0' for 'some/quantised', which has F16, Q4_K_M, Q4_K_S" in call("some/quantised:Q5_0")


@pytest.mark.slow
def test_errors_of_the_hub_are_one_line(hub, tmp_path):
    """No such repository or revision, no safetensors, no network with an empty cache."""
    server, call = hub
    server.repositories["some/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    server.repositories["some/data"] = {"train.csv": b"x"}
    assert "pickled weights are not read" in call("some/pickled")
    assert "must have config.json" in call("some/data")
    for arguments in (("some/nothing",), ("some/pickled", "v9")):
        output = call(*arguments)
        assert output.startswith(
            "ConfigError [checkpoint.find_model] a model is a directory or a repository"
        ), output
    assert "HF_HUB_OFFLINE" in call("some/other", HF_HUB_OFFLINE="1")


def test_an_existing_directory_takes_precedence(tmp_path, monkeypatch):
    """An existing directory is used; a text that is not a repository name is treated as a path."""
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert str(find_model("some/model")) == "some/model"
    for name in ("nowhere", "a/b/c", "./a/b", "../b", "/a/b", "a/.."):
        assert find_model(name) == Path(name)
    with pytest.raises(ConfigError, match="a revision belongs to"):
        find_model("some/model", "main")
    for revision in ("", "../x", "a/../../x", "a b", 3):
        with pytest.raises(ConfigError, match="a revision is"):
            find_model("other/model", revision)
