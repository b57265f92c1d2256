"""The tables of the demo's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from tilewise.train import CompressionReport

__all__ = ["show_compression", "show_memory", "show_side_by_side", "show_stages"]


def show_side_by_side(prompt: str, untrained: str, trained: str, console: Console) -> None:
    """Show the continuations of one prompt by the untrained and the trained model."""
    from rich.table import Table
    from rich.text import Text

    table = Table("untrained", "trained", title="the same prompt, before and after", expand=True)
    table.add_row(Text(prompt + _printable(untrained)), Text(prompt + _printable(trained)))
    console.print(table)


def show_memory(label: str, usage: Sequence[Mapping[str, int]], console: Console) -> None:
    """Show bytes per device and category."""
    from rich.table import Table

    table = Table("memory, MiB", *(f"device {i}" for i in range(len(usage))), title=label)
    for name in sorted(usage[0], key=lambda n: (n == "total", n)):
        if not any(device[name] for device in usage):
            continue
        table.add_row(name, *(f"{device[name] / 2**20:.2f}" for device in usage))
    console.print(table)


def show_compression(
    bits: float, others: CompressionReport, num_files: int, num_bytes: int, console: Console
) -> None:
    """Show bits per byte of the model and of general compressors."""
    from rich.table import Table

    title = f"bits per byte on {num_files} held-out files ({num_bytes / 1e3:.0f} kB)"
    table = Table("predictor", "file by file", "all files joined", title=title)
    table.add_row("this model (sliding windows)", f"{bits:.3f}", "")
    table.add_row("gzip -9", f"{others.gzip_each:.3f}", f"{others.gzip_joined:.3f}")
    table.add_row("xz -9e", f"{others.xz_each:.3f}", f"{others.xz_joined:.3f}")
    console.print(table)
    verdict = "beats" if bits < others.gzip_each else "does not beat"
    console.print(f"the model {verdict} gzip file by file", highlight=False)


def show_stages(seconds: Mapping[str, float], console: Console) -> None:
    """Show the time of each stage."""
    from rich.table import Table

    table = Table("stage", "seconds", title="time of each stage")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.1f}")
    table.add_row("all", f"{sum(seconds.values()):.1f}")
    console.print(table)


def _printable(text: str) -> str:
    """Text without control characters, which would move the terminal's cursor."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\u00b7" for c in text)
