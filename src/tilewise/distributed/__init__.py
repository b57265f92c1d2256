"""Several processes that run one program: `ProcessGroup` opens them, `init` and `shutdown` begin
and end a program, and `distributed.worker` is the program of a worker.
"""

from tilewise.distributed.group import ProcessGroup, launched_group
from tilewise.distributed.lifecycle import ProcessRole, init, shutdown

__all__ = ["ProcessGroup", "ProcessRole", "init", "launched_group", "shutdown"]
