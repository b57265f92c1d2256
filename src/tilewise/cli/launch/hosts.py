"""The hosts of a launch: from what the command line or a file says to how many processes each runs.

A file has a host on each line, `name` or `name:slots` as MPICH writes it, and comments after `#`. All of it is checked
before anything starts: names go to ssh, so they are names or addresses and nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tilewise.core.errors import ConfigError
from tilewise.core.mesh import MAX_DEVICES

__all__ = ["Host", "place_processes", "read_hosts"]

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        name: that ssh knows, or an address.
        slots: processes that it may run, None where nothing is said.
    """

    name: str
    slots: int | None = None


def read_hosts(text: str) -> list[Host]:
    """The hosts of an option: a file's where it names one, else names with commas between them.

    Raises:
        ConfigError: a host twice, none at all, what is no name, a number of slots that is none, or a file that cannot
            be read; says where.
    """
    path = Path(text)
    if "/" not in text and not os.path.isfile(text):  # which no length is too much for
        return _read((f"--hosts, entry {number}", entry) for number, entry in enumerate(text.split(","), 1))
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"[cli.hosts] --hosts is a file with a host on each line, or names with commas between them; got {error}; "
            "correct the path"
        ) from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(
            f"[cli.hosts] a file of hosts has at most {_MAX_BYTES} bytes; got more; give the right file"
        )
    lines = content.decode("utf-8-sig", "replace").splitlines()
    entries = ((number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1))
    return _read((f"{path.name}, line {number}", entry) for number, entry in entries if entry)


def _read(entries: Iterable[tuple[str, str]]) -> list[Host]:
    """Hosts from texts and where each stands."""
    hosts: dict[str, Host] = {}
    for where, entry in entries:
        name, colon, slots = entry.strip().partition(":")
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"[cli.hosts] {where}: a host is a name or an IPv4 address, then perhaps :slots; got {entry[:80]!r}; "
                "write one host, without options"
            )
        if colon and not (re.fullmatch("[0-9]{1,4}", slots) and 1 <= int(slots) <= MAX_DEVICES):
            raise ConfigError(
                f"[cli.hosts] {where}: slots are a number from 1 to {MAX_DEVICES}; got {slots[:80]!r}; say how many "
                "processes the host runs"
            )
        if name in hosts:
            raise ConfigError(
                f"[cli.hosts] {where}: a host stands once; got {name!r} again; give it {name}:SLOTS"
            )
        hosts[name] = Host(name, int(slots) if colon else None)
    if not hosts:
        raise ConfigError("[cli.hosts] there must be a host; got none; write one on each line")
    return list(hosts.values())


def place_processes(hosts: list[Host], processes: int) -> list[tuple[str, int]]:
    """How many processes each host runs, in blocks of neighbours: as slots say, or as equally as can be.

    Where one host has slots, a host without has one. Hosts that get none are left out.

    Raises:
        ConfigError: there are fewer slots than processes, or hosts without slots that would get no process.
    """
    if all(host.slots is None for host in hosts):
        if processes < len(hosts):
            raise ConfigError(
                f"[cli.hosts] every host runs a process; got {processes} for {len(hosts)} hosts; name fewer hosts"
            )
        share, more = divmod(processes, len(hosts))
        return [(host.name, share + (number < more)) for number, host in enumerate(hosts)]
    placed, left = [], processes
    for host in hosts:
        here = min(left, host.slots or 1)
        placed.append((host.name, here))
        left -= here
    if left:
        raise ConfigError(
            f"[cli.hosts] processes need a slot each; got {processes} for {processes - left} slots; give the hosts more"
        )
    return [(name, count) for name, count in placed if count]
