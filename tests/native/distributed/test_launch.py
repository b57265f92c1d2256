"""`tilewise launch`: commands with devices in several processes, and how they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from native.distributed.test_group import are_gone
from native.server.served import Served, small_model
from tilewise.cli.launch import restart
from tilewise.core.errors import LOST

CONFIGURATION = """
[model]
vocab_size = 300
hidden_size = 64
intermediate_size = 96
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2

[data]
path = "texts"
context = 64

[train]
steps = 60
batch = 4
batch_splits = 4

[distribution]
strategy = "ddp"
mesh = {{ dp = 2 }}
workers_per_device = 1

[output]
directory = "{directory}"
checkpoint_every = 5
"""


def command(*arguments):
    """The words of a command of this program."""
    return [sys.executable, "-m", "tilewise", *arguments]


def children(pid):
    """The child processes of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def weights(folder, directory):
    """The bytes of a trained model."""
    return (folder / directory / "model" / "model.safetensors").read_bytes()


def make_run(folder, directory):
    """A configuration with its texts."""
    (folder / "texts").mkdir(exist_ok=True)
    for number in range(30):
        (folder / "texts" / f"{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 40)
    (folder / f"{directory}.toml").write_text(CONFIGURATION.format(directory=directory))
    return f"{directory}.toml"


def wait_for_checkpoint(run, directory):
    """Wait until a run has written its first checkpoint."""
    while not list((directory / "checkpoints").glob("step-*")):
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["a worker", "the leader"])
def test_restart_ends_with_the_same_weights(tmp_path, killed):
    """After any process was killed once; a second loss is not restarted."""
    config = make_run(tmp_path, "broken")
    run = subprocess.Popen(
        command("launch", "-n", "2", "--restart", "1", "train", config),
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    wait_for_checkpoint(run, tmp_path / "broken")
    (leader,) = children(run.pid)
    (worker,) = children(leader)
    os.kill(worker if killed == "a worker" else leader, signal.SIGKILL)
    err = run.communicate(timeout=120)[1]
    how = "the loss of a process" if killed == "a worker" else "signal 9"
    assert run.returncode == 0 and f"ended by {how}; restarting (1 of 1)" in err
    assert are_gone([leader, worker], 0)
    alone = command("train", make_run(tmp_path, "alone"))
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True)
    assert weights(tmp_path, "broken") == weights(tmp_path, "alone")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("is_terminal", [False, True], ids=["alone", "with its group"])
def test_a_signal_to_the_launch_is_not_restarted(tmp_path, number, is_terminal):
    """Nothing remains; the command gets the signal once, whether the launch alone or its process group got it."""
    run = subprocess.Popen(
        command("launch", "-n", "2", "--restart", "5", "train", make_run(tmp_path, "run")),
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    wait_for_checkpoint(run, tmp_path / "run")
    (leader,) = children(run.pid)
    workers = children(leader)
    if is_terminal:
        os.killpg(run.pid, number)
    else:
        run.send_signal(number)
    assert run.wait(30) == (-9 if number == signal.SIGKILL else 128 + number)
    assert are_gone([leader, *workers])
    err = run.stderr.read()
    assert "restarting (" not in err and "Traceback" not in err
    if number == signal.SIGINT:
        assert "resume with --resume" in err and err.count("interrupted") == 1


@pytest.mark.slow
def test_a_restarting_launch_can_be_paused(tmp_path):
    """Ctrl-Z also stops the command, and continuing the launch continues it."""

    def is_stopped(pid, expected):
        """Whether a process is stopped, once it is as expected or after ten seconds."""
        until = time.monotonic() + 10
        path = Path(f"/proc/{pid}/stat")
        while (stopped := path.read_text().rsplit(")", 1)[1].split()[0] == "T") != expected:
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        return stopped

    run = subprocess.Popen(
        command("launch", "-n", "2", "--restart", "5", "train", make_run(tmp_path, "run")),
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    wait_for_checkpoint(run, tmp_path / "run")
    (leader,) = children(run.pid)
    os.killpg(run.pid, signal.SIGTSTP)
    assert is_stopped(run.pid, True) and is_stopped(leader, True)
    os.killpg(run.pid, signal.SIGCONT)
    assert not is_stopped(run.pid, False) and not is_stopped(leader, False)
    run.communicate(timeout=60)
    assert run.returncode == 0


@pytest.mark.parametrize(
    "args", [["run.toml"], ["--", "run.toml"], ["run.toml", "--auto-resume"]], ids=" ".join
)
def test_auto_resume_is_inserted_before_the_arguments(monkeypatch, args):
    """The option is valid with any arguments of the command."""
    started, ends = [], iter([(LOST, False), (LOST, False), (0, False)])
    monkeypatch.setattr(restart, "_run_once", lambda words: started.append(words) or next(ends))
    assert restart.run_again(["-n", "2"], ["train", *args], 2) == 0
    before = ["launch", "-n", "2", "--", "train"]
    assert started == [[*before, *args], *[[*before, "--auto-resume", *args]] * 2]


def test_the_exit_code_after_a_restart(tmp_path):
    """A mistake is not a loss: it is reported once."""
    done = subprocess.run(
        command("launch", "-n", "2", "--restart", "3", "verify", make_run(tmp_path, "run"), "--mesh", "dp=3"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("tilewise: [") == 1
    assert done.stderr.startswith("tilewise: [") and "Traceback" not in done.stderr


def test_a_command_that_begins_with_an_option():
    """The option belongs to the command, also when it is restarted."""
    words = command("launch", "-n", "2", "--restart", "1", "--", "--version")
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("tilewise ")


@pytest.mark.slow
def test_a_server_over_two_processes():
    """It generates the same as one process; without one of its processes it ends."""
    body = {"prompt": [3, 4, 5], "max_tokens": 12, "temperature": 0}
    texts = []
    for launch in ((), ("launch", "-n", "2")):
        server = Served(small_model(), "--tp", "2", launch=launch).wait_ready()
        status, answer = server.ask("/v1/completions", body)
        assert status == 200
        texts.append(answer["choices"][0]["text"])
        (engine,) = children(server.process.pid)
        workers = children(engine)
        assert len(workers) == len(launch[1:]) // 2
        if workers:
            os.kill(workers[0], signal.SIGKILL)
            assert server.ask("/v1/completions", body)[0] >= 500
            assert server.process.wait(30) == 1
            assert are_gone([engine, *workers])
        else:
            assert server.close() == 0
    assert texts[0] == texts[1]
