"""Lists the fields of config.json that have no effect on what a model computes, and those with one
supported value.

Families add fields in `ModelConfig.only` and `ModelConfig.without_effect`. `has_no_effect`
decides about fields that are not in these tables; docs/models.md states its rule for users.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = [
    "MAX_POSITIONS",
    "ONLY",
    "WITHOUT_EFFECT",
    "has_no_effect",
    "ignore_advice",
]

MAX_POSITIONS = 1 << 20  # of any model
_UNUSED = """
_name_or_path name_or_path _commit_hash transformers_version tokenizer_class auto_map custom_pipelines
unsloth_version unsloth_fixed transformers.js_config

_attn_implementation _attn_implementation_internal _attn_implementation_autoset attn_implementation
_flash_attn_2_enabled _use_flash_attention_2 use_flash_attention use_flash_attention_2 use_flash_attn
use_cache cache_implementation output_past pretraining_tp gradient_checkpointing chunk_size_feed_forward
use_bfloat16 torchscript tf_legacy_loss return_dict output_hidden_states output_attentions

dropout attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob embd_pdrop resid_pdrop
attn_pdrop classifier_dropout initializer_range

max_sequence_length max_seq_length max_seq_len model_max_length

sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
suppress_tokens begin_suppress_tokens

finetuning_task task_specific_params problem_type id2label label2id num_labels _num_labels prefix
tie_encoder_decoder
"""
WITHOUT_EFFECT = frozenset(_UNUSED.split())
"""Fields without effect in any family: notes of tools, how attention is implemented, caches, dropout and
initialisation of training, lengths that other programs use, generation (generation_config.json has it), labels of
tasks."""

ONLY: Mapping[str, tuple[object, ...]] = {
    "is_decoder": (False, True),  # transformers' decoders never read it
    "is_causal": (True,),
    "causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "pruned_heads": ({},),
    "use_bidirectional_attention": (False,),
}
"""Fields of every family with their supported values; others describe another model. null is always accepted."""

_LABELS = (
    "name path version revision url uri repo repository commit hash sha dir directory folder file filename date "
    "timestamp author license language title description comment note notes model checkpoint id"
)
_LABEL_WORDS = frozenset(_LABELS.split())
# A field whose name has one of these words may affect the computation, whatever its value looks like.
_COMPUTED = """
act activation func function norm attn attention causal mask window bias rope rotary position positions positional
mlp ffn ff glu layer layers block cell mixer head heads kv quant quantization scale scaling router expert experts
"""
_COMPUTED_WORDS = frozenset(_COMPUTED.split())
_WORD = re.compile(r"[A-Z]*[a-z0-9]+|[A-Z]+")
_VERSION = re.compile(r"v?[0-9]+\.[0-9]+\.[0-9]+[\w.+-]*|v[0-9]+(\.[0-9]+)*")
_MAX_LABEL = 4096


def has_no_effect(name: str, value: object) -> bool:
    """Whether an unknown field can be ignored, by its name and value alone.

    null and false disable something that the family does not have. A string that is a name, a path
    or a version only identifies something. It is one by the last word of the field's name, or
    because it contains a slash or looks like `4.41.2`. A number is a version only if the field's
    name ends in `version`. Strings and numbers of fields that name a part of the computation
    (attention, norm, rope, ...) are never ignored.
    """
    if value is None or value is False:
        return True
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or not _COMPUTED_WORDS.isdisjoint(words):
        return False
    if isinstance(value, str):
        is_label = (
            words[-1] in _LABEL_WORDS or "/" in value or "\\" in value or bool(_VERSION.fullmatch(value))
        )
        return is_label and len(value) <= _MAX_LABEL
    return isinstance(value, int | float) and value is not True and words[-1] == "version"


def ignore_advice(name: str) -> str:
    """The advice about an unknown field, for every caller that reads configurations."""
    return (
        f"if it does not affect the computation, ignore it by name: --ignore-config-field {name}, "
        f"ignore_config_fields=[{name!r}] in Python, or model.ignore_config_fields of a training configuration"
    )
