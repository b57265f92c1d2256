"""AdamW with clipping by the global norm, added to a graph behind its gradients.

Weights in bf16 get fp32 masters; in fp32 the weight is its own master. All state has the weight's layout and storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tilewise.core.border import Border
from tilewise.graph.builder import GraphBuilder
from tilewise.ir.graph import TensorNode

__all__ = ["HYPER", "MAX_FLOAT", "AdamW", "master_name", "moment_names"]

_border = Border("optim")
MAX_FLOAT = float(np.finfo(np.float32).max)
HYPER = "optimizer.hyper"  # input [8]: lr, beta1, beta2, eps, 1-beta1^t, 1-beta2^t, two unused


def master_name(parameter: str) -> str:
    """Name of the fp32 master of a parameter."""
    return f"optimizer.master.{parameter}"


def moment_names(parameter: str) -> tuple[str, str]:
    """Names of a parameter's first and second moment."""
    return f"optimizer.exp_avg.{parameter}", f"optimizer.exp_avg_sq.{parameter}"


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as `torch.optim.AdamW`.

    Args:
        beta1: as in Adam.
        beta2: as in Adam.
        eps: as in Adam.
        weight_decay: for weights; vectors (norms) are not decayed.
        max_grad_norm: gradients are scaled down to this global norm; 0 leaves them as they are.

    A step whose loss or gradient norm is not finite leaves weights and moments as they were.

    Raises:
        ConfigError: a value is out of range.

    Source: Loshchilov and Hutter 2019.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2", "eps", "weight_decay", "max_grad_norm"):
            value = _border.number("AdamW", name, getattr(self, name), 0.0, MAX_FLOAT)
            object.__setattr__(self, name, value)
        if self.beta1 >= 1 or self.beta2 >= 1 or np.float32(self.eps) <= 0:
            _border.refuse(
                "AdamW", "betas lie in [0, 1), and eps is above 0 in fp32", str(self), "correct it"
            )

    def add_to(self, graph: GraphBuilder, gradients: Mapping[str, int]) -> TensorNode:
        """Append norm and update of every parameter; returns (norm, scale)."""
        graph.draft.phase = "update"
        hyper = graph.input([8], "f32", name=HYPER, storage="vector")
        tensors = graph.draft.tensors
        nodes = [tensors[g] for g in gradients.values()]
        loss = tensors[graph.draft.outputs["loss"]]
        clip = graph.op("global_norm", [loss, *nodes], max_norm=self.max_grad_norm)[0]
        graph.output(clip, "grad_norm")
        for name, gradient in gradients.items():
            weight = graph.find(name)
            spec = replace(tensors[gradient].spec, labels=weight.spec.labels)

            def state(state_name: str, like: TensorNode = weight) -> TensorNode:
                return graph.state(
                    like.spec.shape,
                    "f32",
                    name=state_name,
                    labels=like.spec.labels,
                    storage=like.spec.storage,
                )

            master = state(master_name(name)) if weight.spec.dtype.name == "bf16" else None
            m, v = (state(n) for n in moment_names(name))
            decay = self.weight_decay if len(spec.shape) == 2 else 0.0
            graph.op("adamw", [weight, master, m, v, tensors[gradient], hyper, clip], weight_decay=decay)
        return clip
