"""Runs on pairs: the log-probabilities of the reference model, and figures about rewards.

The reference is the model before its first step. Its log-probabilities are computed once, by the
forward pass of the training graph, and stored in a file of the run's output. A resumed run reads this
file; if it is damaged or missing, they are computed again from the initial weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FiniteFloat

from tilewise.core import NotFinite, get_logger
from tilewise.data import PairBatches, PairedExamples
from tilewise.files.reading import Unreadable, parse_json, read_whole
from tilewise.files.writing import replace_text
from tilewise.nn import PreferenceLoss

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewise.session import GraphInstance

__all__ = ["pair_figures", "pairs_digest", "read_reference", "reference_log_probs", "write_reference"]

_MAX_BYTES = 1 << 30
_LogProbs = NDArray[np.float32]


def reference_log_probs(
    model: GraphInstance, batches: PairBatches, show: Callable[[int, int], None]
) -> _LogProbs:
    """Log-probabilities `[number of pairs, 2]` that a model gives the sequences of pairs.

    Args:
        model: an instance of the training graph.
        batches: the pairs.
        show: called with the number of pairs that are done and of all.

    Raises:
        NotFinite: a log-probability is not finite.
    """
    count, size = batches.num_windows, batches.batch
    result = np.empty((count, 2), np.float32)
    for first in range(0, count, size):
        pairs = [min(first + i, count - 1) for i in range(size)]  # the last batch repeats the last pair
        model.forward(**batches.batch_of(pairs))
        result[pairs] = model.get_tensor("log_probs").reshape(-1, 2)
        show(min(first + size, count), count)
    if not np.isfinite(result).all():
        pair = int(np.argwhere(~np.isfinite(result))[0][0])
        raise NotFinite(
            f"[train.preference] log-probabilities of the reference must be finite; got others for pair {pair}; check "
            "the weights of model.path"
        )
    return result


class _Stored(BaseModel):
    """The file: log-probabilities of the chosen and the rejected sequences of each pair."""

    model_config = ConfigDict(strict=True, extra="forbid")

    data: str
    train: list[tuple[FiniteFloat, FiniteFloat]]
    held_out: list[tuple[FiniteFloat, FiniteFloat]]


def pairs_digest(*parts: object) -> str:
    """SHA-256 of the ids and labels of pairs. Parts that are not `PairBatches` count as absent."""
    digest = hashlib.sha256()
    for part in parts:
        for source in part.batches.sources if isinstance(part, PairBatches) else ():
            assert isinstance(source, PairedExamples)
            examples = source.examples
            for array in (examples.tokens, examples.labels, examples.ends):
                digest.update(array.tobytes())
        digest.update(b"|")
    return digest.hexdigest()


def write_reference(path: Path, digest: str, train: _LogProbs, held_out: _LogProbs) -> None:
    """Write the log-probabilities of the reference.

    Args:
        path: the file.
        digest: of the data.
        train, held_out: by pair.

    Raises:
        ResourceError: the file cannot be written.
    """
    content = {"data": digest, "train": train.tolist(), "held_out": held_out.tolist()}
    replace_text(path, json.dumps(content) + "\n")


def read_reference(
    path: Path, digest: str, num_train: int, num_held_out: int
) -> tuple[_LogProbs, _LogProbs] | None:
    """The log-probabilities in a file, if they are those of this data; otherwise None, with a warning.

    Args:
        path: the file.
        digest: of the data.
        num_train, num_held_out: numbers of pairs.
    """
    try:
        stored = parse_json(read_whole(path, _MAX_BYTES), _Stored)
        if stored.data != digest or (len(stored.train), len(stored.held_out)) != (num_train, num_held_out):
            raise Unreadable("it belongs to other data")
        with np.errstate(over="ignore"):
            both = [np.array(pairs, np.float32).reshape(-1, 2) for pairs in (stored.train, stored.held_out)]
        if not all(np.isfinite(values).all() for values in both):
            raise Unreadable("a number is beyond fp32")
    except Unreadable as error:
        get_logger("train").warning("%s is computed again: %s", path, error)
        return None
    return both[0], both[1]


def pair_figures(loss: PreferenceLoss, batch: Mapping[str, Any], log_probs: _LogProbs) -> dict[str, Any]:
    """Figures about pairs, each `[pairs]` in fp64.

    Args:
        loss: the settings of the loss.
        batch: the inputs of a step.
        log_probs: of the batch's sequences.

    Returns:
        `loss`; `reward_margin`, the reward of the chosen sequence minus that of the rejected one, where
        a reward is beta times the score; and `reward_accuracy`, which is 1 where this is above 0.
    """
    scores = log_probs.astype(np.float64) - batch["reference_log_probs"]
    rewards = loss.beta * (scores[0::2] - scores[1::2])
    if loss.loss_type == "ipo":
        scores = scores * batch["inverse_lengths"]
    margins = scores[0::2] - scores[1::2]
    if loss.loss_type == "sigmoid":
        x, e = loss.beta * margins, loss.label_smoothing
        losses = (1 - e) * np.logaddexp(0, -x) + e * np.logaddexp(0, x)
    elif loss.loss_type == "hinge":
        losses = np.maximum(0.0, 1.0 - loss.beta * margins)
    else:
        losses = (margins - 1.0 / (2.0 * loss.beta)) ** 2
    accuracy = (rewards > 0).astype(np.float64)
    return {"loss": losses, "reward_margin": rewards, "reward_accuracy": accuracy}
