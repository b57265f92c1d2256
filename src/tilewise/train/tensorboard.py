"""Figures of a run as TensorBoard event files, with the tags of transformers' callback. The files
are written by tensorboardX, an extra of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tilewise.core import ConfigError
from tilewise.files.writing import writing

__all__ = ["EventFiles", "require_tensorboard"]

_TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "held_out_loss": "eval/loss",
    "held_out_perplexity": "eval/perplexity",
    "reward_margin": "train/rewards/margins",
    "reward_accuracy": "train/rewards/accuracies",
    "held_out_reward_margin": "eval/rewards/margins",
    "held_out_reward_accuracy": "eval/rewards/accuracies",
}


def require_tensorboard() -> None:
    """Check that tensorboardX is installed.

    Raises:
        ConfigError: it is not.
    """
    if find_spec("tensorboardX") is None:
        raise ConfigError(
            "[train.run] output.report_to = 'tensorboard' needs the package tensorboardX; got no such package; "
            "pip install 'tilewise[tensorboard]', or set output.report_to = 'none'"
        )


class EventFiles:
    """Appends figures to the event files of a directory.

    Args:
        directory: of the files; it is created.
        first_step: steps done before. TensorBoard drops what an interrupted run wrote after them.

    Raises:
        ResourceError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        from tensorboardX import SummaryWriter

        with writing(directory):
            purge = first_step + 1 if first_step else None
            self._writer: Any = SummaryWriter(logdir=str(directory), purge_step=purge)

    def add(self, num_steps: int, figures: Mapping[str, float | int | None]) -> None:
        """Write the figures of the step after which `num_steps` steps are done."""
        for name, value in figures.items():
            if value is not None and name not in ("step", "seconds"):
                self._writer.add_scalar(_TAGS.get(name, f"train/{name}"), value, num_steps)

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self._writer.close()
