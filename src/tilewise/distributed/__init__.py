"""Several processes that run one program: `ProcessGroup` opens them, `distributed.worker` is what the others run."""

from __future__ import annotations

from tilewise.comm import Group

__all__ = ["ProcessGroup"]


class ProcessGroup(Group):
    """This process and `num_processes - 1` workers beside it, on this host. Models over several devices have them in
    all of these processes while it is open; nothing else in a program changes, and no bit of a result.

    Args:
        num_processes: this one among them.

    Raises:
        ConfigError: not between 1 and 1024, or another group is open.

    Examples:
        >>> with ProcessGroup(2) as group:
        ...     group.start()  # or with the first model that needs them
        ...     len(group.pids)
        2
    """

    def __init__(self, num_processes: int) -> None:
        super().__init__(num_processes, "tilewise.distributed.worker")
