"""Runs of `tilewise train` that are killed, and the invariants of their output after every kill.

A run is killed by itself, before the n-th operation on a file of its output (through Python's audit
hook), or from outside, shortly after a checkpoint's temporary directory appears; the second also
hits the middle of writing a file. After each kill, every checkpoint with a final name is complete,
the newest step never decreases, and no hidden files of the previous run remain. Faults are planted
by lines that run before `tilewise`; the product does not know about kills.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from native.train.small_run import is_same, weights
from tilewise.checkpoint import load_checkpoint, open_weights
from tilewise.train import read_metrics

HIDDEN = ".tilewise-tmp-*"
_PROGRAM = """
import os, signal, sys
prefix, last = sys.argv[1], int(sys.argv[2])
count = 0

def watch(event, arguments):
    global count
    if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"):
        return
    if event in ("os.remove", "os.rmdir") and arguments[-1] != -1:  # rmtree passes a descriptor and a name
        is_meant = prefix.endswith(("/", "a tree"))
    else:
        is_meant = isinstance(arguments[0], str) and arguments[0].startswith(prefix)
    if is_meant:
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
from tilewise.cli.main import main
"""
NON_ATOMIC_WRITER = """
import tilewise.checkpoint.training as training
def straight(path, write):
    path.mkdir()
    write(path)
training.replace_directory = straight
"""
REMOVED_IN_PLACE = """
import shutil, tilewise.checkpoint.training as training
training.remove_directory = shutil.rmtree
"""
LEFTOVERS_KEPT = """
import tilewise.checkpoint.training as training, tilewise.train.run as run
training.remove_leftovers = run.remove_leftovers = lambda directory: None
"""


class KilledRun:
    """A training run that is repeatedly killed and resumed.

    Args:
        file: its configuration.
        out: its output directory.
        fault: Python code that each of its processes runs first.
    """

    def __init__(self, file: Path, out: Path, fault: str = "") -> None:
        self.file, self.out, self.checkpoints = file, out, out / "checkpoints"
        self._program = f"{_PROGRAM}{fault}\nmain(sys.argv[3:])"
        self.newest = 0
        self.num_kills = 0
        self.num_in_writing = 0  # kills that left something half written behind, under a hidden name

    def kill_at(self, operation: int, below: str = "") -> bool:
        """Resume, and kill before the n-th operation on a path of the output that begins with
        `below` (`a tree`: on entries of a directory that is removed); False if the run ended
        before. 0: no kill.
        """
        return self._is_killed(self._start(operation, below))

    def kill_while_writing(self, rng: random.Random) -> bool:
        """Resume, and kill shortly after one of the first checkpoints begins to be written."""
        process = self._start(0)
        for _ in range(rng.randint(1, 3)):
            before = self._hidden()
            while process.poll() is None and self._hidden() <= before:
                time.sleep(0.0003)
        time.sleep(rng.uniform(0.0, 0.008))
        process.kill()
        return self._is_killed(process)

    def finish(self) -> None:
        """Resume and let it finish."""
        assert not self.kill_at(0)

    def _start(self, operation: int, below: str = "") -> subprocess.Popen[str]:
        is_resumed = self.checkpoints.is_dir() and any(self.checkpoints.glob("step-*"))
        arguments = [
            f"{self.out}/{below}",
            operation,
            "train",
            self.file,
            *(["--resume"] if is_resumed else []),
        ]
        command = [sys.executable, "-c", self._program, *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def _is_killed(self, process: subprocess.Popen[str]) -> bool:
        """Wait for its end and check its output."""
        output = process.communicate(timeout=600)[1]
        assert process.returncode in (0, -signal.SIGKILL), output
        assert "damaged" not in output, output  # so no incomplete checkpoint was loaded
        killed = process.returncode == -signal.SIGKILL
        self.num_kills += killed
        self.num_in_writing += killed and bool(self._hidden())
        self.check(process.pid)
        return killed

    def _hidden(self) -> set[Path]:
        return {*self.out.glob(HIDDEN), *self.checkpoints.glob(HIDDEN)}

    def check(self, pid: int) -> None:
        """The invariants when no process runs; `pid` is the last process."""
        steps = sorted(self.checkpoints.glob("step-*"))
        for path in steps:
            meta = path / "checkpoint.json"
            settings = json.loads(meta.read_text())["config"] if meta.exists() else {}
            assert load_checkpoint(path, settings).tensors
        newest = int(steps[-1].name.removeprefix("step-")) if steps else 0
        assert newest >= self.newest, steps
        self.newest = newest
        if (self.out / "model").exists():
            assert open_weights(self.out / "model") and (self.out / "model" / "tokenizer.json").stat().st_size
        for folder in (self.out, self.checkpoints):
            hidden = [path.name for path in folder.glob(HIDDEN)]
            own = [name for name in hidden if name.endswith(f"-{pid}")]
            assert own in ([], hidden), (
                hidden
            )  # before it writes there, a process removes what was left there


def is_equal(out: Path, alone: Path) -> bool:
    """Whether two finished runs have the same weights, last checkpoint and metrics to the bit, and
    the same names.
    """
    losses = [
        [(line["step"], line["loss"]) for line in read_metrics(path / "metrics.jsonl")]
        for path in (out, alone)
    ]
    names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in (out, alone)]
    states = [
        [path.read_bytes() for path in sorted(folder.rglob("device-*.safetensors"))]
        for folder in (out, alone)
    ]
    return (
        names[0] == names[1]  # nothing hidden is left over either
        and losses[0] == losses[1]
        and states[0] == states[1]
        and is_same(weights(out), weights(alone))
    )
