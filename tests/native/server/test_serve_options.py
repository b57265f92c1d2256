"""The options of `tilewise serve`: each reaches its setting."""

import re
import shutil

import pytest
from typer.main import get_command

from native.server.served import Served, small_model
from tilewise.cli.main import _run, app

SERVER = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("1234", 1234),
    "uds": ("socket", "socket"),
    "api-key": ("one", ["one", "two"]),
    "allowed-hosts": ("a.example", ["a.example"]),
    "allowed-origins": ("https://a.example", ["https://a.example"]),
    "ssl-keyfile": ("key", "key"),
    "ssl-certfile": ("certificate", "certificate"),
    "served-model-name": ("small", ["small"]),
    "trust-request-chat-template": (None, True),
    "tool-call-parser": ("mistral", "mistral"),
    "reasoning-parser": ("deepseek_r1", "deepseek_r1"),
    "stream-interval": ("3", 3),
    "max-logprobs": ("4", 4),
    "max-num-waiting": ("5", 5),
    "max-request-bytes": ("6K", 6144),
    "max-connections": ("7", 7),
    "header-timeout": ("8", 8.0),
    "body-timeout": ("9", 9.0),
    "send-timeout": ("10", 10.0),
    "request-timeout": ("11", 11.0),
    "shutdown-timeout": ("12", 12.0),
    "disable-log-requests": (None, False),
}
ENGINE = {
    "tensor-parallel-size": ("2", 2),
    "data-parallel-size": ("3", 3),
    "dtype": ("f32", "f32"),
    "load-format": ("dummy", "dummy"),
    "lora": ("a=b", ["a=b"]),
    "quantization": ("int4", "int4"),
    "quantized-matmul": ("grouped", "grouped"),
    "kv-cache-dtype": ("int8", "int8"),
    "max-model-len": ("1k", 1000),
    "max-num-seqs": ("4", 4),
    "max-num-batched-tokens": ("5", 5),
    "kv-cache-memory": ("1.5G", 3 << 29),
    "workers-per-device": ("6", 6),
    "no-enable-prefix-caching": (None, False),
    "generation-config": ("vllm", False),
    "speculative-config": ('{"num_speculative_tokens": 4}', {"num_speculative_tokens": 4}),
    "runner": ("pooling", "pooling"),
    "ignore-config-field": ("note", ["note"]),
}
OTHER_NAMES = {
    "api_key": "api_keys",
    "served_model_name": "served_model_names",
    "disable_log_requests": "log_requests",
    "ignore_config_field": "ignore_config_fields",
    "kv_cache_memory": "kv_cache_memory_bytes",
    "lora": "lora_modules",
    "no_enable_prefix_caching": "enable_prefix_caching",
}
SHORT = {
    "tensor-parallel-size": "-tp",
    "data-parallel-size": "-dp",
    "kv-cache-memory": "--kv-cache-memory-bytes",
    "lora": "--lora-modules",
}


def _option_names():
    """First long names of the options, with underscores."""
    params = [
        param for param in get_command(app).commands["serve"].params if param.param_type_name == "option"
    ]
    return {next(n for n in param.opts if n[:2] == "--")[2:].replace("-", "_") for param in params}


def _setting(option):
    name = option.replace("-", "_")
    return OTHER_NAMES.get(name, f"{name}_s" if name.endswith("timeout") else name)


def test_a_rejected_model_is_one_line(tmp_path):
    """The reason, with an option of this command that helps; the engine's process ends silently."""
    shutil.copytree(small_model(), tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"temperature": "hot"}')
    server = Served(tmp_path / "m")
    assert server.wait_end() == 2
    listening, message = server.log
    assert listening.startswith("listening on") and "temperature" in message
    options = set(re.findall(r"--[a-z-]+", message))
    names = {name for param in get_command(app).commands["serve"].params for name in param.opts}
    assert options == {"--generation-config"} <= names


@pytest.mark.parametrize("has_short", [False, True])
def test_every_option_reaches_its_setting(tmp_path, monkeypatch, has_short):
    """No option is without effect or unknown to this test."""
    calls = []
    monkeypatch.setattr("tilewise.server.serve", lambda *args, **more: calls.append((*args, more)))
    monkeypatch.setattr("tilewise.server.link.spawn.spawn_engine", lambda: None)
    monkeypatch.setattr("tilewise.checkpoint.find_model", lambda *args: args)
    (tmp_path / "keys").write_text("two\n")
    (tmp_path / "template").write_text("{{ 1 }}")
    command = ["serve", str(small_model()), "--api-key-file", str(tmp_path / "keys"), "--revision", "main"]
    command += ["--chat-template", str(tmp_path / "template")]
    for option, (args, _) in {**SERVER, **ENGINE}.items():
        name = SHORT.get(option, f"--{option}") if has_short else f"--{option}"
        command += [name] if args is None else [name, args]
    assert _run(command) == 0
    ((model, settings, engine, more),) = calls
    assert model == (str(small_model()), "main") and more["name"] == str(small_model())
    assert settings.chat_template == "{{ 1 }}"
    assert engine == {_setting(option): value for option, (_, value) in ENGINE.items()}
    for option, (_, value) in SERVER.items():
        assert getattr(settings, _setting(option)) == value, option
    passed = {part.lstrip("-").replace("-", "_") for part in command if part.startswith("--")}
    options_of_settings = {"enable_prefix_caching": "no_enable_prefix_caching"}
    names = {options_of_settings.get(name, name) for name in _option_names()}
    assert has_short or names == passed


def test_a_wrong_value_is_reported_with_its_option(capsys, monkeypatch):
    """Before anything starts, in one line."""
    monkeypatch.setattr("tilewise.server.link.spawn.spawn_engine", lambda: None)
    wrong = {
        "max-request-bytes": "2Q",
        "max-model-len": "-1",
        "kv-cache-memory": "G",
        "generation-config": "x",
    }
    wrong |= {"speculative-config": "{", "header-timeout": "0", "dtype": "f8"}
    for option, value in wrong.items():
        assert _run(["serve", str(small_model()), f"--{option}={value}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--{option}" in line
