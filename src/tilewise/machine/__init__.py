"""The machine that runs this process: settings that slow programs down and can be changed, and the
speed of cores and memory.
"""

from tilewise.machine.checks import Finding, check_machine
from tilewise.machine.speed import PROBE_BYTES, measure_bandwidth, measure_flops

__all__ = ["PROBE_BYTES", "Finding", "check_machine", "measure_bandwidth", "measure_flops"]
