"""The rules of a program of the `update` kernel: every step has an existing kind and reads existing
values.

The kernel (native/kernels/update.cc) does not check its program. An unknown kind of step, or a
number beyond the last value, would crash the process. So programs in graphs and plans from files
are checked here.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.kernels.reference import UPDATE_STEPS

__all__ = ["find_update_problem"]


def find_update_problem(
    num_inputs: int, num_arrays: int, steps: Sequence[object], left: Sequence[object]
) -> str:
    """Describe what is wrong with a program; empty if the program is valid.

    Args:
        num_inputs: number of values before the first step: weight, states, gradient,
            hyper-parameters, constants.
        num_arrays: number of arrays that are written: the weight and the states.
        steps: steps of four integers: the kind, and the numbers of three values.
        left: number of the final value of each array.
    """
    if not all(type(number) is int for number in (*steps, *left)):
        return "it must consist of integers"
    if len(steps) % 4 != 0 or len(left) != num_arrays:
        return f"it has {len(steps)} integers of steps, and leaves {len(left)} values for {num_arrays} arrays"
    for place in range(0, len(steps), 4):
        kind, *values = steps[place : place + 4]
        if kind not in range(len(UPDATE_STEPS)):
            return f"step {place // 4} is of kind {kind}; there are {len(UPDATE_STEPS)}"
        if not all(value in range(num_inputs + place // 4) for value in values):
            return f"step {place // 4} takes values {values}; {num_inputs + place // 4} exist before it"
    num_values = num_inputs + len(steps) // 4
    return "" if all(v in range(num_values) for v in left) else f"it leaves values {[*left]} of {num_values}"
