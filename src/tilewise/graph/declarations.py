"""`Declarations`: the calls of `GraphBuilder` that declare tensors and append an op by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from tilewise.core.dims import Dim, DimLabel, Size, upper_bound
from tilewise.core.dtypes import DType
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator, shown
from tilewise.formats import FORMATS, weight_format
from tilewise.graph.draft import GraphDraft
from tilewise.ir.graph import TensorNode, TensorSpec
from tilewise.ir.hints import Hint, as_tensor_layout
from tilewise.ir.op import check_call

__all__ = ["INV_COUNT", "POSITIONS", "SEED", "Declarations", "is_dropout_key", "is_own_name"]

INV_COUNT = "loss.inv_count"
SEED = "loss.seed"  # the gradient of the loss with respect to itself: 1
POSITIONS = (
    "rows.positions"  # each row's position in its sequence, if the sequence length varies between runs
)

_DROPOUT_KEY = re.compile(r"(.+\.)?dropout\.key\d+")

_validate = Validator("graph", ShapeError)

Labels = Sequence[DimLabel | None]


def is_dropout_key(name: str) -> bool:
    """Whether a name is that of the key of a call of dropout, an input that the instance computes."""
    return _DROPOUT_KEY.fullmatch(name) is not None


def is_own_name(name: str) -> bool:
    """Whether a name is that of an input that the framework declares and computes itself."""
    return name in (INV_COUNT, POSITIONS) or is_dropout_key(name)


class Declarations:
    """The part of `GraphBuilder` for tensors from outside, and for ops by name."""

    draft: GraphDraft
    formats: Mapping[str, str]
    quantized_matmul: str

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """A `with` block whose declarations and ops are removed if it raises."""
        return self.draft.all_or_nothing()

    # ---- tensors from outside -----------------------------------------------------------------------------

    def input(
        self,
        shape: Sequence[Size] | TensorSpec,
        dtype: str | DType = "f32",
        name: str = "",
        *,
        labels: Labels = (),
        storage: str = "rows",
        layout: Hint | None = None,
        tile_hint: int | None = None,
    ) -> TensorNode:
        """Declare a tensor whose value is given at every call.

        Args:
            shape: sizes, or a `TensorSpec`, which then says everything but the name and the layout.
            dtype: element type.
            name: the input's name.
            labels: per dim, a label that says what the dim counts, or None.
            storage: `"scalars"` for a tensor with one number per row (ids, labels, positions).
            layout: the mesh axes that shard the tensor's dims (ir/hints.py). By default, that of the
                `TensorSpec`, or the strategy's rules decide.
            tile_hint: rows per tile.
        """
        return self._declare("input", _spec("input", shape, dtype, labels, name, storage, tile_hint), layout)

    def parameter(
        self,
        shape: Sequence[Size] | TensorSpec,
        dtype: str | DType = "f32",
        name: str = "",
        *,
        labels: Labels = (),
        init: str | None = None,
        init_scale: float = 1.0,
        trainable: bool = True,
        layout: Hint | None = None,
        tile_hint: int | None = None,
    ) -> TensorNode:
        """Declare a trained tensor: a vector, or a weight `[out, in]` or `[in, out]`, which is
        stored in packed panels.

        Args:
            shape: one or two sizes, or a `TensorSpec`, which then says everything but name, initial
                values and layout.
            dtype: element type.
            name: the parameter's path.
            labels: per dim, a label that says what the dim counts, or None.
            init: initial values: `normal`, `ones` or `zeros`; by default random weights, and ones
                for vectors.
            init_scale: standard deviation of random values, as a multiple of that of other weights.
            trainable: False for a parameter that training does not change. It has no gradient, no
                fp32 master and no optimizer state.
            layout: as in `input`.
            tile_hint: rows per tile; for a weight a multiple of 32.
        """
        trainable = _validate.truth("parameter", "trainable", trainable)
        spec = _spec("parameter", shape, dtype, labels, name, "rows", tile_hint)
        if len(spec.shape) > 2 or not all(isinstance(s, int) for s in spec.shape) or spec.dtype.name == "i32":
            _validate.invalid(
                "parameter",
                "a parameter must have one or two fixed dims of f32 or bf16",
                f"{spec} {name!r}",
                "declare it with one or two dims, for example [out, in]",
            )
        storage = "packed" if len(spec.shape) == 2 else "vector"
        first = init if init is not None else {"packed": "normal", "vector": "ones"}[storage]
        if spec.name in self.formats:
            storage = self._format_of(spec)
        layout = spec.dist_hint if layout is None else layout
        spec = replace(spec, storage=storage, init=first, init_scale=init_scale)
        node = self._declare("parameter", spec, layout)
        if not trainable:
            self.draft.freeze_parameter(node.id)
        return node

    def freeze_parameters(self, *patterns: str) -> list[str]:
        """Let training not change parameters that are declared by now.

        Args:
            patterns: of their names, such as `layers.[0-7].*` or `*norm.weight`.

        Returns:
            The names of all parameters that match, in order of declaration.

        Raises:
            ShapeError: there is no pattern, or one matches no parameter.
        """
        rule = "patterns must be names of parameters, with * for any characters"
        if not patterns:
            _validate.invalid("freeze_parameters", rule, "none", 'pass "layers.0.*"')
        parameters = [t for t in self.draft.tensors if t.kind == "parameter"]
        for pattern in patterns:
            _validate.text("freeze_parameters", "a pattern of names", pattern)
            if not any(fnmatchcase(t.spec.name, pattern) for t in parameters):
                advice = "see the names in print(graph)"
                _validate.invalid("freeze_parameters", rule, f"{pattern!r}, which matches none", advice)
        frozen = [t for t in parameters if any(fnmatchcase(t.spec.name, p) for p in patterns)]
        for node in frozen:
            self.draft.freeze_parameter(node.id)
        return [node.spec.name for node in frozen]

    def _format_of(self, spec: TensorSpec) -> str:
        """The format that a parameter is stored in, by the builder's `formats`."""
        name = weight_format(self.formats[spec.name]).name
        if (
            len(spec.shape) != 2
            or spec.dtype.name != "bf16"
            or upper_bound(spec.shape[1]) % FORMATS[name].block
        ):
            _validate.invalid(
                "parameter",
                f"a weight in {name} must be bf16 [n, k] with k in blocks of {FORMATS[name].block}",
                f"{spec} {spec.name!r}",
                "leave it out of formats",
            )
        return name

    def state(
        self,
        shape: Sequence[Size],
        dtype: str | DType = "f32",
        *,
        name: str,
        labels: Labels = (),
        storage: str = "rows",
        layout: Hint | None = None,
    ) -> TensorNode:
        """Declare a tensor that persists between calls and is written in place (a KV cache,
        optimizer moments). `layout` is as in `input`.
        """
        spec = _spec("state", shape, dtype, labels, name, storage, None)
        if not all(isinstance(s, int) for s in spec.shape):
            _validate.invalid(
                "state", "a state must have fixed dims", f"{spec} for {name!r}", "give it its largest size"
            )
        return self._declare("state", spec, layout)

    def constant(
        self, value: np.ndarray, name: str, *, labels: Labels = (), storage: str = "rows"
    ) -> TensorNode:
        """Declare a tensor whose value is known now, such as RoPE tables."""
        dtypes = {np.dtype(np.float32): "f32", np.dtype(np.int32): "i32"}
        if not isinstance(value, np.ndarray) or value.dtype not in dtypes or np.ma.is_masked(value):
            _validate.invalid(
                "constant",
                "a constant must be an array of float32 or int32 without a mask",
                f"{shown(value)}, {name!r}",
                "convert it with .astype(np.float32) or .astype(np.int32), and fill masked elements",
            )
        spec = _spec("constant", value.shape, dtypes[value.dtype], labels, name, storage, None)
        _require_batch_first("constant", spec)
        node = self.draft.declare("constant", spec)
        copy = np.array(value, order="C")  # the caller may change its own array
        copy.flags.writeable = False
        self.draft.constant_values[node.id] = copy
        return node

    def positions(self, tokens: TensorNode) -> TensorNode:
        """The position of each row in its sequence, from 0: i32, with the shape `[batch, seq]` of
        the tokens.

        If `seq` is fixed, the result is a constant. If `seq` is symbolic, the instance computes the
        positions at every run.

        Raises:
            ShapeError: the tokens belong to another graph or do not have two dims, or the graph
                already has positions.
        """
        spec = self.draft.own("positions", tokens).spec
        batch, length = (*spec.shape, 1, 1)[:2]
        if len(spec.shape) != 2 or isinstance(batch, Dim):
            _validate.invalid(
                "positions", "tokens must be [batch, seq]", f"{spec}", "declare them with two dims"
            )
        name = POSITIONS if isinstance(length, Dim) else "positions"
        if self.has(name):
            _validate.invalid(
                "positions",
                f"a graph may have only one tensor {name!r}",
                f"a second one for {spec}; the first is {self.find(name).spec}",
                f"use graph.find({name!r}) if it has the tokens' shape, otherwise your own i32 input or constant",
            )
        if not isinstance(length, Dim):
            value = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
            return self.constant(value, name=name, labels=spec.labels, storage="scalars")
        own = TensorSpec(spec.shape, dtype_named("i32"), spec.labels, name, storage="scalars")
        return self.draft.declare("input", own)

    def constrain(self, tensor: TensorNode, layout: Hint) -> TensorNode:
        """Ask for a layout of a tensor, and return the tensor. The layout changes where results are
        computed and what is transferred, but no bit of a result.

        Args:
            layout: `("dp", None, "tp")`, or `{"dp": Shard(0), "tp": Replicate()}` (ir/hints.py).
                Axes that a mesh does not have are ignored.

        Raises:
            LayoutError: `layout` is not a layout of the tensor.
            ShapeError: the tensor belongs to another graph.
        """
        self.draft.own("constrain", tensor)
        name = tensor.spec.name or f"result {tensor.id}"
        self.draft.hint(tensor.id, as_tensor_layout("constrain", layout, len(tensor.shape), name))
        return tensor

    def _declare(self, kind: str, spec: TensorSpec, layout: Hint | None) -> TensorNode:
        _require_batch_first(kind, spec)
        with self.all_or_nothing():
            node = self.draft.declare(kind, spec)
            layout = spec.dist_hint if layout is None else layout
            return node if layout is None else self.constrain(node, layout)

    def output(self, tensor: TensorNode, name: str) -> TensorNode:
        """Make a result readable by name after a run."""
        self.draft.own("output", tensor)
        _validate.text("output", "an output's name", name)
        self.draft.name_output(name, tensor.id)
        return tensor

    # ---- reading ------------------------------------------------------------------------------------------

    def find(self, name: str) -> TensorNode:
        """The input, parameter, state or constant with this name.

        Raises:
            ShapeError: no tensor has this name.
        """
        names = self.draft.names
        if name not in names:
            raise ShapeError(
                f"[graph.find] the graph must have the tensor; got {name!r}; it has {', '.join(names)}"
            )
        return self.draft.tensors[names[name]]

    def has(self, name: str) -> bool:
        """Whether an input, parameter, state or constant has this name."""
        return isinstance(name, str) and name in self.draft.names

    # ---- operations ---------------------------------------------------------------------------------------

    def op(self, name: str, inputs: Sequence[TensorNode | None], **attrs: Any) -> list[TensorNode]:
        """Append an op by name, and return its outputs. If an equal op on the same operands exists,
        return the outputs of that op.

        Raises:
            ShapeError: the call does not match the op's signature, or its operands do not fit
                together.
        """
        operands = _validate.sequence("op", "operands", inputs, "tensors")
        checked = check_call(name, operands, attrs)
        ids = tuple(None if t is None else self.draft.own(name, t).id for t in operands)
        return [self.draft.tensors[i] for i in self.draft.op(name, ids, checked)]


def _require_batch_first(kind: str, spec: TensorSpec) -> None:
    """Check that only the first dim of a declared tensor counts the batch."""
    for dim, label in enumerate(spec.labels):
        if (
            label is not None
            and label.is_summed_by_batch_splits
            and (dim > 0 or kind not in ("input", "constant"))
        ):
            _validate.invalid(
                kind,
                f"{label.name!r} may label only dim 0 of inputs and constants",
                f"dim {dim} of {kind} {spec.name!r}",
                "transpose it, or choose another label",
            )


def _spec(
    call: str,
    shape: Sequence[Size] | TensorSpec,
    dtype: str | DType,
    labels: Labels,
    name: str,
    storage: str,
    tile_hint: int | None,
) -> TensorSpec:
    if isinstance(shape, TensorSpec):
        spec = shape.renamed(name) if name else shape
        others = {"dtype": dtype not in ("f32", spec.dtype), "labels": bool(tuple(labels))}
        others |= {"tile_hint": tile_hint is not None, "storage": storage != "rows"}
        if any(others.values()):
            got = ", ".join(other for other, is_passed in others.items() if is_passed)
            _validate.invalid(call, "a TensorSpec says what a tensor is", f"one, and {got}", "set it there")
        name = spec.name
    else:
        spec = TensorSpec(shape, dtype_named(dtype), labels, name, tile_hint, storage)
    if name == SEED or is_own_name(name):
        _validate.invalid(call, f"the name {name!r} is reserved", "a tensor of that name", "rename it")
    return spec
