"""`tilewise bench`: measures generation, in this process and of servers, with vLLM's arguments and
figures.
"""

from tilewise.cli.bench.offline import bench

__all__ = ["bench"]
