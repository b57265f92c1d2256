"""The hosts of a launch: reads from the command line or a file how many processes run on each host.

A file has one host per line, in MPI's formats: `name`, `name:slots` (MPICH), or `name slots=2
max_slots=4` (Open MPI). If a host is on several lines, their slots are added. A line without a
number counts as one slot, as in $PBS_NODEFILE and the output of `srun hostname`. A name may be a
list in Slurm's notation (`node[01-03,07]`). Comments begin with `#`. Options of Hydra without
effect here (binding, ifname, user, port) are ignored with a warning. Everything is checked before
anything starts. Names are passed to ssh, so only host names and addresses are accepted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewise.core.errors import ConfigError
from tilewise.core.log import warn_once
from tilewise.core.mesh import MAX_DEVICES

__all__ = ["Host", "place_processes", "read_hosts"]

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_LIST = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)")  # Slurm's format
_OUTSIDE = re.compile(r",(?![^\[]*\])")  # commas that are not inside brackets
_SLOTS = ("slots", "cpu", "count")  # Open MPI's keys
_MOST_SLOTS = tuple(
    f"{a}{sign}{b}" for word in _SLOTS for a, b in ((word, "max"), ("max", word)) for sign in "_-"
)
_WITHOUT_EFFECT = ("binding", "ifname", "user", "port")  # Hydra's keys
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        name: a name that ssh knows, or an address.
        slots: number of processes that it may run; None if not given.
    """

    name: str
    slots: int | None = None


def read_hosts(text: str) -> list[Host]:
    """The hosts that an option names. The option is the name of a file, or names of hosts separated
    by commas.

    Raises:
        ConfigError: there is no host, a name or number of slots is invalid, or a file cannot be
            read. The message says where.
    """
    path = Path(text)
    if "/" not in text and not os.path.isfile(text):  # false for a text that is too long for a path
        entries = enumerate(_OUTSIDE.split(text), 1)
        return _read((f"--hosts, entry {number}", entry.strip()) for number, entry in entries)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"[cli.hosts] --hosts must be a file with one host per line, or names separated by commas; got {error}; "
            "correct the path"
        ) from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(
            f"[cli.hosts] a file of hosts must have at most {_MAX_BYTES} bytes; got more; give another file"
        )
    lines = content.decode("utf-8-sig", "replace").splitlines()
    stripped = ((number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1))
    return _read((f"{path.name}, line {number}", entry) for number, entry in stripped if entry)


def _read(entries: Iterable[tuple[str, str]]) -> list[Host]:
    """Hosts from strings, each with its place for messages. If a host appears several times, its
    slots are added.
    """
    hosts: dict[str, Host] = {}
    for where, entry in entries:
        names, *options = re.sub(r"\s*=\s*", "=", entry).split() or [""]
        names, colon, number = names.partition(":")
        slots = _slots(where, number) if colon else None
        slots = _option_slots(where, options, slots)
        for name in _expanded(where, names):
            user, at, host = name.rpartition("@")
            if at and _NAME.fullmatch(user) and _NAME.fullmatch(host):
                raise ConfigError(
                    f"[cli.hosts] {where}: a host must not have a user, because ssh's configuration determines it; got "
                    f"{name!r}; write {host} and set User {user} for it in ~/.ssh/config"
                )
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"[cli.hosts] {where}: a host must be a name or an IPv4 address, then maybe :SLOTS or slots=SLOTS; "
                    f"got {entry[:80]!r}; correct it"
                )
            if name in hosts:
                hosts[name] = Host(name, (hosts[name].slots or 1) + (slots or 1))
            else:
                hosts[name] = Host(name, slots)
            if len(hosts) > MAX_DEVICES:
                raise ConfigError(
                    f"[cli.hosts] {where}: at most {MAX_DEVICES} hosts are supported; got more; name fewer"
                )
    if not hosts:
        raise ConfigError("[cli.hosts] there must be at least one host; got none; name one per line")
    return list(hosts.values())


def _slots(where: str, number: str) -> int:
    if not (re.fullmatch("[0-9]{1,4}", number) and 1 <= int(number) <= MAX_DEVICES):
        raise ConfigError(
            f"[cli.hosts] {where}: slots must be a number from 1 to {MAX_DEVICES}; got {number[:80]!r}; set how many "
            "processes the host runs"
        )
    return int(number)


def _option_slots(where: str, options: list[str], slots: int | None) -> int | None:
    """The slots in Open MPI's options. `max_slots` is used if `slots` is missing."""
    most = None
    for option in options:
        key, equals, number = option.partition("=")
        if equals and key in _WITHOUT_EFFECT:
            warn_once("cli", f"[cli.hosts] {key}= has no effect in a file of hosts and is ignored ({where})")
            continue
        if not equals or key not in (*_SLOTS, *_MOST_SLOTS):
            raise ConfigError(
                f"[cli.hosts] {where}: the options of a host are slots=SLOTS and max_slots=SLOTS; got {option[:80]!r}; "
                "remove it"
            )
        if key in _MOST_SLOTS:
            most = _slots(where, number)
        elif slots is not None:
            raise ConfigError(
                f"[cli.hosts] {where}: a line must set the slots of a host only once; got {option[:80]!r} again; "
                "remove it"
            )
        else:
            slots = _slots(where, number)
    if slots is not None and most is not None and most < slots:
        raise ConfigError(
            f"[cli.hosts] {where}: max_slots must be at least slots; got {most} and {slots}; correct one of them"
        )
    return most if slots is None else slots


def _expanded(where: str, names: str) -> Iterator[str]:
    """The names in a Slurm list such as `node[01-03,07]`. A plain name yields itself."""
    match = _LIST.fullmatch(names)
    if match is None:
        yield names
        return
    before, ranges, after = match.groups()
    for one in ranges.split(","):
        bounds = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", one)
        first, last = (0, -1) if bounds is None else (int(bounds[1]), int(bounds[2] or bounds[1]))
        if bounds is None or not first <= last < first + MAX_DEVICES:
            raise ConfigError(
                f"[cli.hosts] {where}: brackets must have numbers and ranges up to {MAX_DEVICES}, such as [01-03,07]; "
                f"got {one[:80]!r}; correct it"
            )
        for number in range(first, last + 1):
            yield from _expanded(where, f"{before}{number:0{len(bounds[1])}}{after}")


def place_processes(hosts: list[Host], processes: int) -> list[tuple[str, int]]:
    """The number of processes of each host. Each host gets a contiguous block of processes: as many
    as its slots, or, if no host has slots, as evenly as possible.

    If any host has slots, a host without a number counts as one slot. The result has no hosts
    without processes.

    Raises:
        ConfigError: there are fewer slots than processes, or a host without slots would get no
            process.
    """
    if all(host.slots is None for host in hosts):
        if processes < len(hosts):
            raise ConfigError(
                f"[cli.hosts] every host must get a process; got {processes} for {len(hosts)} hosts; name fewer hosts"
            )
        share, more = divmod(processes, len(hosts))
        return [(host.name, share + (number < more)) for number, host in enumerate(hosts)]
    placed, num_left = [], processes
    for host in hosts:
        share_here = min(num_left, host.slots or 1)
        placed.append((host.name, share_here))
        num_left -= share_here
    if num_left:
        raise ConfigError(
            f"[cli.hosts] every process needs a slot; got {processes} for {processes - num_left}; give more slots"
        )
    return [(name, count) for name, count in placed if count]
