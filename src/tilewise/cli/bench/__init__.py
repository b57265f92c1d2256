"""`tilewise bench`: how quickly models write, here and behind servers; arguments and figures as vLLM names them."""

from tilewise.cli.bench.offline import bench

__all__ = ["bench"]
