"""Tile programs: functions for one device of many, which move tiles, signal and compute
(`tile_program`), and the devices that run them (`DeviceGroup`).
"""

from tilewise.tiles.group import DeviceGroup, Signals, SymmTensor
from tilewise.tiles.in_graph import NewSignals
from tilewise.tiles.program import TileProgramFunction, TracedProgram, tile_program

__all__ = [
    "DeviceGroup",
    "NewSignals",
    "Signals",
    "SymmTensor",
    "TileProgramFunction",
    "TracedProgram",
    "tile_program",
]
