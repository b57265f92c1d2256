"""Direct preference optimization: a loss on pairs of a chosen and a rejected sequence, relative to the
log-probabilities that a reference model gives them (Rafailov et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewise.core.dtypes import MAX_F32
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator
from tilewise.graph import GraphBuilder
from tilewise.ir.graph import TensorNode
from tilewise.ir.kinds import Kind

__all__ = ["LOSS_TYPES", "PreferenceLoss", "preference_loss"]

LOSS_TYPES = ("sigmoid", "hinge", "ipo")
_validate, _validate_shape = Validator("nn"), Validator("nn", ShapeError)


@dataclass(frozen=True)
class PreferenceLoss(Kind):
    """A loss on pairs, with the names of TRL's `DPOConfig`.

    With the score of a sequence, which is its log-probability minus that of the reference, and the
    margin, which is the chosen sequence's score minus the rejected one's, the loss of a pair is

    - `sigmoid`: `-log sigmoid(beta * margin)`; with `label_smoothing` e it is `(1 - e)` times this
      plus `e` times `-log sigmoid(-beta * margin)`;
    - `hinge`: `max(0, 1 - beta * margin)`;
    - `ipo`: `(margin - 1 / (2 beta)) ** 2`, where scores are means over a sequence's counted labels.

    Args:
        beta: how close to the reference the model stays; above 0.
        loss_type: `sigmoid`, `hinge` or `ipo`.
        label_smoothing: share of pairs that are taken to be labelled wrongly, in [0, 0.5); only
            with `sigmoid`.

    Raises:
        ConfigError: a value is out of range.
    """

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        beta = _validate.number("PreferenceLoss", "beta", self.beta, 0.0, MAX_F32)
        if beta < 1e-6:
            _validate.invalid("PreferenceLoss", "beta must be 1e-6 or more", f"{beta}", "usual is 0.1")
        _validate.choice("PreferenceLoss", "loss_type", self.loss_type, LOSS_TYPES)
        smoothing = _validate.number("PreferenceLoss", "label_smoothing", self.label_smoothing, 0.0, 0.499)
        if smoothing and self.loss_type != "sigmoid":
            rule = "label_smoothing must be 0 unless loss_type is sigmoid"
            _validate.invalid("PreferenceLoss", rule, f"{smoothing} with {self.loss_type}", "set it to 0")
        object.__setattr__(self, "beta", beta)
        object.__setattr__(self, "label_smoothing", smoothing)


def preference_loss(
    graph: GraphBuilder, logits: TensorNode, labels: TensorNode, loss: PreferenceLoss
) -> tuple[TensorNode, TensorNode]:
    """The mean loss of pairs, and the log-probability of each sequence.

    Declares the input `reference_log_probs` `[B]` f32: log-probabilities that the reference model
    gives the sequences. With `ipo`, it also declares `inverse_lengths` `[B]` f32: 1 / number of
    counted labels of each sequence.

    Args:
        graph: with the model.
        logits: `[B, S, V]`. Sequences 2i and 2i + 1 are the chosen and the rejected one of a pair.
        labels: `[B, S]` i32; -100 is not counted.
        loss: settings.

    Returns:
        The loss `[1]` and the log-probabilities `[B]`, both f32.

    Raises:
        ShapeError: B is not a fixed even number.
    """
    batch, label = labels.shape[0], labels.spec.labels[0]
    if not isinstance(batch, int) or batch % 2:
        rule = "sequences must be pairs, of a fixed number"
        _validate_shape.invalid("preference_loss", rule, f"{labels.spec}", "pass 2n sequences")
    with graph.all_or_nothing():

        def of_pairs(name: str, chosen: float, rejected: float) -> TensorNode:
            value = np.tile(np.array([chosen, rejected], np.float32), batch // 2)
            return graph.constant(value, f"preference.{name}", labels=[label], storage="scalars")

        def per_sequence(name: str) -> TensorNode:
            return graph.input([batch], "f32", name=name, labels=[label], storage="scalars")

        log_probs = graph.sequence_log_probs(logits, labels)
        scores = graph.sub(log_probs, per_sequence("reference_log_probs"))
        if loss.loss_type == "ipo":
            scores = graph.mul(scores, per_sequence("inverse_lengths"))
        # both sequences of a pair compute its loss: one from the margin, the other from minus the margin
        signed = graph.sub(scores, graph.swap_pairs(scores))
        if loss.loss_type == "sigmoid":
            targets = of_pairs("targets", 1.0 - loss.label_smoothing, loss.label_smoothing)
            rows = graph.binary_cross_entropy_with_logits(
                graph.mul(signed, loss.beta), targets, reduction="none"
            )
        else:
            margins = graph.mul(signed, of_pairs("signs", 1.0, -1.0))
            if loss.loss_type == "hinge":
                rows = graph.relu(graph.sub(1.0, graph.mul(margins, loss.beta)))
            else:
                distance = graph.sub(margins, 1.0 / (2.0 * loss.beta))
                rows = graph.mul(distance, distance)
        return graph.mean(rows), log_probs
