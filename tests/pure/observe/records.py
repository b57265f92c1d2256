"""Records of traced runs, as the tests of this folder make them."""

from tilewise.observe.trace import Stall, TaskSpan


def span(id, times, worker=0, kernel="k", **fields):
    """A task with its four times."""
    submit, ready, start, end = times
    return TaskSpan(
        **{"submitter": 0, "scope_depth": 0, "status": 0, "priority": 0} | fields,
        task=id,
        kernel=kernel,
        worker=worker,
        submit_ns=submit,
        ready_ns=ready,
        start_ns=start,
        end_ns=end,
    )


def stall(begin, end, cause="window", **fields):
    """A stall of submitter 0."""
    return Stall(
        **{"submitter": 0, "live_tasks": 1, "heap_used_bytes": 0} | fields,
        cause=cause,
        begin_ns=begin,
        end_ns=end,
    )
