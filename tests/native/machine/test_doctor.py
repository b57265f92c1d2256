"""`tilewise doctor`: its findings for machines with problems, and for this one."""

import json
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tilewise.cli.main import main
from tilewise.core import ConfigError
from tilewise.machine import checks
from tilewise.machine.checks import check_machine

CPUS = "sys/devices/system/cpu"
QUIET = {
    "proc/cpuinfo": "processor : 0\nmodel name : Test 1\nprocessor : 1\nmodel name : Test 1\n",
    "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 1048576 kB\n",
    "proc/loadavg": "0.10 0.20 0.30 1/100 4242\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 8388608 kB\n",
    f"{CPUS}/cpu0/topology/thread_siblings_list": "0\n",
    f"{CPUS}/cpu1/topology/thread_siblings_list": "1\n",
    f"{CPUS}/cpu0/cpufreq/scaling_governor": "performance\n",
}
CASES = {  # files that are otherwise, and what is found then: name, state, a part of what is said
    "quota": ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, "cores", "note", "1.5 of them"),
    "siblings": (
        {f"{CPUS}/cpu{cpu}/topology/thread_siblings_list": "0-1\n" for cpu in (0, 1)},
        "simultaneous threads",
        "note",
        "2 threads on 1 cores",
    ),
    "governor": (
        {f"{CPUS}/cpu0/cpufreq/scaling_governor": "powersave\n"},
        "frequency",
        "warning",
        "cpupower",
    ),
    "its driver": (
        {
            f"{CPUS}/cpu0/cpufreq/scaling_governor": "powersave\n",
            f"{CPUS}/cpu0/cpufreq/scaling_driver": "intel_pstate\n",
        },
        "frequency",
        "ok",
        "powersave of intel_pstate",
    ),
    "nodes": (
        {"sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 8388608 kB\n"},
        "memory nodes",
        "note",
        "numactl",
    ),
    "a node without memory": (
        {"sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 0 kB\n"},
        "memory nodes",
        None,
        "",
    ),
    "overcommit": ({"proc/sys/vm/overcommit_memory": "2\n"}, "overcommit", "warning", "sysctl"),
    "pages": (
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
        "huge pages",
        "warning",
        "echo madvise",
    ),
    "pages of several processes": (
        {
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n"
        },
        "huge pages of several processes",
        "note",
        "echo advise",
    ),
    "clock": (
        {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n"},
        "clock",
        "note",
        "hpet",
    ),
    "load": ({"proc/loadavg": "7.50 1 1 9/100 4242\n"}, "load", "note", "7.5 programs"),
}


def give_mpi(monkeypatch, library):
    """The result of searching MPI: a library, or none."""

    def find_mpi():
        if library is None:
            raise ConfigError("none")
        return SimpleNamespace(table=Path("/table.so"), library=Path(library), name=f"MPI of {library}")

    monkeypatch.setitem(sys.modules, "tilewise.comm.mpi_library", SimpleNamespace(find_mpi=find_mpi))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with two cores and 8 GiB; returns the findings by name with some files changed."""
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    monkeypatch.setattr(checks.shutil, "which", lambda name, path=None: None if path else f"/bin/{name}")
    give_mpi(monkeypatch, None)

    def found(files):
        for name, text in (QUIET | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {finding.name: finding for finding in check_machine(tmp_path)}

    return found


def test_a_machine_without_problems(machine):
    """Everything is `ok`, and checks without information are omitted."""
    findings = machine({})
    assert {finding.state for finding in findings.values()} == {"ok"}
    assert not any(finding.advice for finding in findings.values())
    assert "Test 1" in findings["processor"].description
    assert findings["memory"].description.endswith("1.00 GiB available")


@pytest.mark.parametrize("case", CASES)
def test_each_problem_is_found(machine, case):
    """Each alone; all other findings are unchanged."""
    quiet = machine({})
    files, name, state, text = CASES[case]
    findings = machine(files)
    assert {key: finding for key, finding in findings.items() if key != name} == {
        key: finding for key, finding in quiet.items() if key != name
    }
    if state is None:
        assert name not in findings
        return
    finding = findings[name]
    assert finding.state == state and text in f"{finding.description} {finding.advice}"
    assert (finding.advice != "") == (state != "ok")


def test_few_files_no_compiler_and_another_level(machine, monkeypatch):
    """Process limits, missing programs, a forced kernel level and a build for a weaker machine."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(checks.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(checks, "isa_levels", lambda: ["baseline", "avx2", "other"])
    findings = machine({})
    assert findings["open files"].state == "warning" and "ulimit" in findings["open files"].advice
    assert findings["compiler"].description == "no c++ and no cmake"
    assert findings["processor"].state == "note" and "TILEWISE_ISA" in findings["processor"].advice
    for levels in (["baseline"],):
        monkeypatch.setattr(checks, "isa_levels", lambda levels=levels: levels)
        monkeypatch.setattr(checks, "isa_in_use", lambda: "baseline")
        assert machine({})["processor"].state == "warning"
    monkeypatch.setattr(checks, "isa_missing", lambda: ["avx2", "avx512"])
    finding = machine({})["processor"]
    assert finding.state == "warning" and "can run avx512, which this build lacks" in finding.advice


@pytest.mark.parametrize(
    ("library", "absent", "state", "text"),
    [
        ("/lib/libmpi_abi.so.1", (), "ok", "MPI of /lib/libmpi_abi.so.1; /bin/mpiexec"),
        ("libmpi_abi.so.1", (), "ok", "/bin/mpiexec"),
        ("/other/lib/libmpi_abi.so.1", (), "note", "of one installation"),
        ("/lib/libmpi_abi.so.1", ("mpiexec",), "note", "no mpiexec"),
        ("/lib/libmpi_abi.so.1", ("ssh",), "note", "no ssh"),
    ],
)
def test_which_mpi(machine, monkeypatch, library, absent, state, text):
    """Launcher and library are named, and whether they match; with MPI, that its ports are open."""
    assert "MPI's ports" not in machine({})
    give_mpi(monkeypatch, library)
    monkeypatch.setattr(
        checks.shutil, "which", lambda name, path=None: None if path or name in absent else f"/bin/{name}"
    )
    findings = machine({})
    assert (
        findings["MPI"].state == state and text in f"{findings['MPI'].description} {findings['MPI'].advice}"
    )
    assert "only in trusted networks" in findings["MPI's ports"].advice


@pytest.mark.parametrize(
    "named", ["/absent/table.so", "/", "x" * 5000], ids=["absent", "a folder", "too long"]
)
def test_a_variable_without_an_mpi_library(machine, monkeypatch, named):
    """The variable is the reason, and installing MPI would not help."""
    monkeypatch.undo()
    monkeypatch.setenv("TILEWISE_MPI", named)
    finding = machine({})["MPI"]
    assert (
        finding.state == "warning" and "TILEWISE_MPI is" in finding.description and "unset" in finding.advice
    )
    assert len(finding.description) < 200


def test_nothing_is_readable(tmp_path, monkeypatch):
    """A container may hide everything: only the process's own facts are reported."""
    give_mpi(monkeypatch, None)
    assert {"processor", "cores", "memory", "open files", "compiler", "MPI"} >= {
        finding.name for finding in check_machine(tmp_path)
    }


def test_the_command(capsys, monkeypatch):
    """Lines with measured speeds, JSON for programs; exit code 0 also with warnings."""
    give_mpi(monkeypatch, "/lib/libmpi_abi.so.1")
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert {line.split()[0] for line in lines} <= {"ok", "note", "warning", "speed", "->"}
    assert any(line.startswith("speed") and "GB/s" in line for line in lines)
    with pytest.raises(SystemExit):
        main(["doctor", "--json", "--no-measure"])
    report = json.loads(capsys.readouterr().out)
    assert (
        report["speeds"] == {} and {"name", "state", "description", "advice"} == report["findings"][0].keys()
    )
