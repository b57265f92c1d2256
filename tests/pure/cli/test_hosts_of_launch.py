"""`tilewise launch --hosts`: host files, placement of processes, arguments of mpiexec, messages of stand-ins."""

import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.cli.launch import stand_in
from tilewise.cli.launch.hosts import Host, place_processes, read_hosts
from tilewise.cli.launch.over_mpi import Reports, build_command, find_mpiexec
from tilewise.cli.main import main
from tilewise.core import ConfigError

WRONG = {  # text of a file -> words of the error
    "": "there must be at least one host",
    "a:0\n": "line 1: slots must be a number",
    "a\nb:\n": "line 2: slots must be a number",
    "a:99999": "line 1: slots must be a number",
    "a:1:2": "line 1: slots must be a number",
    "a\nb slots=two": "line 2: slots must be a number",
    "a slots": "line 1: the options of a host are slots=SLOTS",
    "me@a slots=2": "line 1: a host must not have a user, .*got 'me@a'; write a and set User me",
    "a b": "line 1: the options of a host are",
    "a:2 slots=2": "line 1: a line must set the slots of a host only once",
    "a slots=4 max_slots=2": "line 1: max_slots must be at least slots; got 2 and 4",
    "slots=2": "line 1: a host must be a name",
    "n[1-3": "line 1: a host must be a name",
    "n[3-1]": "line 1: brackets must have numbers",
    "n[1-999999999]": "line 1: brackets must have numbers",
    "n[]": "line 1: a host must be a name",
    "a\n-oProxyCommand=x": "line 2: a host must be a name",
    "a,b": "line 1: a host must be a name",
    ":2": "line 1: a host must be a name",
    "\x00": "line 1: a host must be a name",
}


def test_host_file_syntax(tmp_path):
    """Slots, comments, blank lines, addresses, a byte order mark; the last line may have no newline."""
    path = tmp_path / "hosts"
    path.write_text("\ufeffnode1:2\n")
    assert read_hosts(str(path)) == [Host("node1", 2)]
    path.write_text("# ours\n node1:2  # large\n\n10.0.0.7\r\nnode-3.example.org:16")
    assert read_hosts(str(path)) == [Host("node1", 2), Host("10.0.0.7"), Host("node-3.example.org", 16)]


FILES = {  # as users of MPI write them, and what they mean
    "localhost\nlocalhost\n": {"localhost": 2},  # $PBS_NODEFILE, `srun hostname`
    "b\na\nb\nb\n": {"b": 3, "a": None},
    "a\n\n# b\na:2\n": {"a": 3},
    "a slots=2\nb  slots = 4 max_slots=8 # ours\nc\n": {"a": 2, "b": 4, "c": None},
    "a slots=1\na slots=2\n": {"a": 3},
    "a cpu=2\nb max-slots=3\nc count=1 max_count=1": {"a": 2, "b": 3, "c": 1},
    "a:2\nb:1\n": {"a": 2, "b": 1},
    "node[08-10,12] slots=2\ngpu[1-2]x[1-2]:4\n": {
        **{f"node{number}": 2 for number in ("08", "09", "10", "12")},
        **{f"gpu{a}x{b}": 4 for a in (1, 2) for b in (1, 2)},
    },
}


@pytest.mark.parametrize("text", FILES)
def test_host_files_of_mpi_and_batch_systems(tmp_path, text):
    """Open MPI's slots, MPICH's, one line per process, Slurm's lists."""
    path = tmp_path / "hosts"
    path.write_text(text)
    assert {host.name: host.slots for host in read_hosts(str(path))} == FILES[text]


@pytest.mark.parametrize("text", WRONG)
def test_wrong_host_files_are_rejected_by_line(tmp_path, text):
    """Before anything starts."""
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_hosts(str(path))
    assert re.search(WRONG[text], str(refused.value))


def test_options_of_hydra_without_effect_are_ignored(tmp_path, caplog):
    """One warning for each, with the option and the line."""
    (tmp_path / "hydra").write_text("a:2 binding=user:0 ifname=eth0\nb user=me slots=3 port=22\n")
    assert read_hosts(str(tmp_path / "hydra")) == [Host("a", 2), Host("b", 3)]
    for name, line in (("binding", 1), ("ifname", 1), ("user", 2), ("port", 2)):
        warnings = [r for r in caplog.messages if f"{name}= has no effect in a file of hosts" in r]
        assert len(warnings) == 1 and f"hydra, line {line}" in warnings[0]


def test_hosts_in_the_option(tmp_path, monkeypatch):
    """Any number of names, checked as lines are; a missing path is not a name."""
    monkeypatch.chdir(tmp_path)
    assert read_hosts("a,b:2") == [Host("a"), Host("b", 2)]
    assert read_hosts("a, b,a") == [Host("a", 2), Host("b")]
    assert [host.name for host in read_hosts("n[1-2,4],m")] == ["n1", "n2", "n4", "m"]  # $SLURM_JOB_NODELIST
    wrong = {"a,,b": "entry 2", "": "entry 1", "a,-x": "entry 2", "a" * 9999: "entry 1"}
    for text, place in wrong.items():
        with pytest.raises(ConfigError, match=place):
            read_hosts(text)
    many = [f"node{number:04}" for number in range(1000)]
    assert [host.name for host in read_hosts(",".join(many))] == many
    for path in ("./absent", "./", "./a\x00"):
        with pytest.raises(ConfigError, match=r"\[cli.hosts\] --hosts must be a file"):
            read_hosts(path)
    (tmp_path / "large").write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="at most"):
        read_hosts("large")


def test_processes_are_placed_in_blocks():
    """Equally without slots, otherwise by slots; every process has a host."""
    assert place_processes([Host("a"), Host("b")], 5) == [("a", 3), ("b", 2)]
    assert place_processes([Host("a", 3), Host("b"), Host("c", 2)], 5) == [("a", 3), ("b", 1), ("c", 1)]
    assert place_processes([Host("a", 2), Host("b", 2)], 2) == [("a", 2)]
    with pytest.raises(ConfigError, match="got 2 for 3 hosts"):
        place_processes([Host("a"), Host("b"), Host("c")], 2)
    with pytest.raises(ConfigError, match="got 4 for 3; give more slots"):
        place_processes([Host("a", 2), Host("b")], 4)


def test_arguments_of_mpiexec(tmp_path):
    """Slots always, so that blocks do not depend on its defaults; a launcher only where one is named."""
    placed, own = [("a", 2), ("b", 1)], [sys.executable, "-I", "-S", stand_in.__file__, "word", "true", "x y"]
    words = build_command("/m", placed, ["true", "x y"], "word", None)
    assert words == ["/m", "-hosts", "a:2,b:1", "-n", "3", *own]
    launcher = ["-launcher", "ssh", "-launcher-exec", str(tmp_path / "in")]
    words = build_command("/m", placed, ["true", "x y"], "word", tmp_path / "in")
    assert words == ["/m", "-hosts", "a:2,b:1", "-n", "3", *launcher, *own]


def test_choice_of_mpiexec(tmp_path, monkeypatch):
    """The named one, next to this Python, or on the path; without one, one line says what to do."""
    next_to, on_path = tmp_path / "bin", tmp_path / "path"
    for folder in (next_to, on_path):
        folder.mkdir()
        (folder / "mpiexec").write_text("#!/bin/sh\n")
        (folder / "mpiexec").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(next_to / "python"))
    monkeypatch.setenv("PATH", str(on_path))
    assert find_mpiexec() == str(next_to / "mpiexec")
    assert find_mpiexec(on_path / "mpiexec") == str(on_path / "mpiexec")
    (next_to / "mpiexec").unlink()
    assert find_mpiexec() == str(on_path / "mpiexec")
    (on_path / "mpiexec").unlink()
    with pytest.raises(ConfigError, match="pip install mpich"):
        find_mpiexec()
    for wrong in (Path("absent"), tmp_path):
        with pytest.raises(ConfigError, match="must be a program"):
            find_mpiexec(wrong)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_messages_of_stand_ins_are_removed_from_output(size):
    """However the bytes are split; other launches' messages, marks of the command itself and broken ones stay."""
    stays = b"\x1e\x1eother 0 ended 1\x1e \x1eword 0 jumped 1\x1e\x1eword x ended 1\x1e\x1eword" + b"y" * 500
    text = (
        b"one\x1eword 0 begun node1\x1e two"
        + stays
        + b"\x1eword 1 ended -9\x1ethree\x1e\x1eword 0 ended 75\x1e\x1ew"
    )
    reports = Reports("word")
    out = b"".join(reports.take(text[start : start + size]) for start in range(0, len(text), size))
    assert out + reports.rest() == b"one two" + stays + b"three\x1e\x1ew"
    assert reports.begun == {0: "node1"} and reports.ended == {0: 75, 1: -9}


def test_exit_is_reported_after_output_was_read():
    """The launch ends the launcher when it hears of an exit: output not yet read would be lost."""
    words = [sys.executable, "-I", "-S", stand_in.__file__, "word", "/bin/sh", "-c", "echo x"]
    own = os.environ | {"PMI_RANK": "1"}
    with subprocess.Popen(words, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        reported = os.read(process.stderr.fileno(), 1000)
        assert reported.startswith(b"\x1eword 1 begun ")
        assert not select.select([process.stderr], [], [], 0.2)[0]
        assert os.read(process.stdout.fileno(), 10) == b"x\n"
        assert os.read(process.stderr.fileno(), 1000) == b"\x1eword 1 ended 0\x1e"
        assert process.poll() is None  # the launcher would end others
        process.send_signal(stand_in.END)
        assert process.wait(10) == 0


def test_stand_in_runs_until_its_command_exits():
    """A premature end message of another sender does not end it."""
    words = [sys.executable, "-I", "-S", stand_in.__file__, "word", "/bin/sh", "-c", "read x; exit 3"]
    own = os.environ | {"PMI_RANK": "0"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, env=own, **pipes) as process:
        assert os.read(process.stderr.fileno(), 1000).startswith(b"\x1eword 0 begun ")
        process.send_signal(stand_in.END)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert os.read(process.stderr.fileno(), 1000) == b"\x1eword 0 ended 3\x1e"
        process.send_signal(stand_in.END)


def test_unknown_launcher_is_rejected():
    """One that does not tell processes their ranks."""
    own = {name: value for name, value in os.environ.items() if name != "PMI_RANK"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", stand_in.__file__, "word", "true"], env=own, capture_output=True
    )
    assert done.returncode == 1 and done.stderr.startswith(b"tilewise: [cli.launch] mpiexec must be MPICH's")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hosts", "a,a,b slots=x"), "slots must be a number"),
        (("--hosts", "a,b,c"), "every host must get a process"),
        (("--hosts", "a", "--restart", "2", "--mpiexec", "absent"), "must be a program"),
        (("--launcher-exec", "in"), "needs --hosts"),
    ],
)
def test_errors_are_reported_once(capsys, words, message):
    """Exit code 2 and one line, before anything starts."""
    with pytest.raises(SystemExit) as ended:
        main(["launch", "-n", "2", *words, "train", "x.toml"])
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and message in lines[0]
