"""GGUF files that Tilewise writes are, read by Tilewise, the same model."""

import numpy as np
import pytest

from native.models.families import ids_of, our_logits
from pure.models.test_gguf_export import CONFIGS, tensors_of
from tilewise.checkpoint import save_pretrained
from tilewise.checkpoint.gguf_writer import write_gguf
from tilewise.models.gguf import gguf_tensors, gguf_values


def written(path, config, tensors, kind):
    """A file of this type, without a tokenizer."""
    write_gguf(path, gguf_values(config, kind), list(gguf_tensors(config, tensors, kind)))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_has_the_logits_of_its_directory(tmp_path, name):
    """In bf16, to the bit, of every family; other weights have others."""
    config, tensors = CONFIGS[name], tensors_of(CONFIGS[name])
    save_pretrained(tmp_path / "model", config.to_dict(), tensors.items())
    ids = ids_of(40, 70)
    logits = our_logits(tmp_path / "model", ids, "bf16")
    file = written(tmp_path / "a.gguf", config, tensors, "bf16")
    assert np.array_equal(our_logits(file, ids, "bf16"), logits) and logits.std() > 0
    changed = next(key for key in tensors if "self_attn.q" in key and key.endswith("proj.weight"))
    tensors[changed] = np.ascontiguousarray(tensors[changed][::-1])
    other = written(tmp_path / "b.gguf", config, tensors, "bf16")
    assert not np.array_equal(our_logits(other, ids, "bf16"), logits)
