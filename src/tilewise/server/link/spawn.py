"""Starts the engine's process before the modules of the HTTP process are loaded, so that both
processes load at the same time.
"""

from __future__ import annotations

from typing import Any

from tilewise.comm import active_group
from tilewise.comm.launcher import refuse_several
from tilewise.processes.children import Spawned, pack

__all__ = ["EngineSpawned", "spawn_engine"]


class EngineSpawned(Spawned):
    """An engine's process."""

    def load(self, model: str, settings: dict[str, Any]) -> None:
        """Send the model to load, and the number of processes.

        Args:
            model: directory of the model.
            settings: fields of `EngineSettings` by name.
        """
        group = active_group()  # this process has no devices: the engine's process opens its own group
        processes = 1 if group is None else group.num_processes
        self.link.sendall(pack({"model": model, "settings": settings, "processes": processes}))


def spawn_engine() -> EngineSpawned:
    """Start a process that loads its modules, and then the model that `load` names.

    Raises:
        ConfigError: a launcher has started several processes. The engine's process cannot join
            them.
    """
    refuse_several(
        "server.serve",
        "a server must start the processes of its engine itself, on one host",
        "start it without the launcher: `tilewise launch -n N serve ...`",
    )
    return EngineSpawned("tilewise.server.link.engine_process")
