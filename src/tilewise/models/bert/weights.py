"""The names of BERT's parameters in files, with and without the head that predicts masked tokens."""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.checkpoint import StoredTensor
from tilewise.models.bert.bert_config import BertConfig
from tilewise.models.layout import FileLayout

__all__ = ["file_layout", "parameter_shapes"]

_WORDS = "bert.embeddings.word_embeddings.weight"
_HEAD = "cls.predictions"
# A pooler and heads of other tasks are not computed here.
_DERIVED = r"embeddings\.(position_ids|token_type_ids)|(pooler\.dense|cls\.seq_relationship)\.(weight|bias)"
_COPIES = {f"{_HEAD}.decoder.weight": _WORDS, f"{_HEAD}.decoder.bias": f"{_HEAD}.bias"}


def file_layout(config: BertConfig, *, with_head: bool) -> FileLayout:
    """The table of a model's files.

    Args:
        config: the model.
        with_head: training needs the head that predicts masked tokens; encoding does not.
    """
    table = tuple(_tensors(config, with_head))
    derived = _DERIVED if with_head else rf"{_DERIVED}|cls\.predictions\..*"
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    copies = _COPIES if with_head else {}
    return FileLayout(table, "bert.", derived, copies, older)


def parameter_shapes(config: BertConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter's name in the training graph and its shape, `[out, in]` or `[out]`."""
    width, inner = config.hidden_size, config.intermediate_size
    columns = {"mlp.down_proj": inner}
    for tensor in _tensors(config, True):
        for name, rows in tensor.parameters:
            is_vector = name.endswith(".bias") or "norm" in name
            of = next((size for part, size in columns.items() if f"{part}." in name), width)
            yield name, (rows,) if is_vector else (rows, of)


def _tensors(config: BertConfig, with_head: bool) -> Iterator[StoredTensor]:
    width, inner = config.hidden_size, config.intermediate_size
    yield StoredTensor(_WORDS, (("embed_tokens.weight", config.vocab_size),))
    for stored, name, rows in (
        ("position_embeddings", "embed_positions", config.max_position_embeddings),
        ("token_type_embeddings", "embed_token_types", config.type_vocab_size),
    ):
        yield StoredTensor(f"bert.embeddings.{stored}.weight", ((f"{name}.weight", rows),))
    yield from _both("bert.embeddings.LayerNorm", "embed_norm", width)
    for i in range(config.num_hidden_layers):
        for stored, name, rows in (
            ("attention.self.query", "self_attn.q_proj", width),
            ("attention.self.key", "self_attn.k_proj", width),
            ("attention.self.value", "self_attn.v_proj", width),
            ("attention.output.dense", "self_attn.o_proj", width),
            ("attention.output.LayerNorm", "attention_norm", width),
            ("intermediate.dense", "mlp.up_proj", inner),
            ("output.dense", "mlp.down_proj", width),
            ("output.LayerNorm", "mlp_norm", width),
        ):
            yield from _both(f"bert.encoder.layer.{i}.{stored}", f"layers.{i}.{name}", rows)
    if with_head:
        yield from _both(f"{_HEAD}.transform.dense", "head.dense", width)
        yield from _both(f"{_HEAD}.transform.LayerNorm", "head.norm", width)
        yield StoredTensor(f"{_HEAD}.bias", (("head.bias", config.vocab_size),))


def _both(stored: str, name: str, rows: int) -> Iterator[StoredTensor]:
    for kind in ("weight", "bias"):
        yield StoredTensor(f"{stored}.{kind}", ((f"{name}.{kind}", rows),))
