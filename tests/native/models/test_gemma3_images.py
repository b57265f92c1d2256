"""The text model of Gemma 3 with images against transformers: both notations of its files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from native.models.families import SIZES, batch_of, ids_of, our_logits, their_logits, training_graph
from tilewise import LLM, SamplingParams, models
from tilewise.checkpoint import save_pretrained
from tilewise.core import CheckpointError, log
from tilewise.data import train_tokenizer

TEXT = {
    **SIZES,
    "vocab_size": 300,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "query_pre_attn_scalar": 20,
    "sliding_window": 9,
}
IMAGES = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}


@pytest.fixture
def model():
    """A small model with images, with weights so large that logits differ clearly."""
    torch.manual_seed(1)
    config = Gemma3Config(
        text_config=dict(TEXT), vision_config=IMAGES, mm_tokens_per_image=4, image_token_index=299
    )
    made = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 1.0 if "embed" in name else 0.2)
            else:
                p.add_(torch.randn_like(p) * 0.2)
    return made


def as_text_model(name):
    """The name of a tensor in the files of a text model."""
    return name.replace("model.language_model.", "model.")


def published(name):
    """The name of a tensor in Google's files."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.")
    return f"language_model.{name}" if name == "lm_head.weight" else name.removeprefix("model.")


@pytest.mark.parametrize("spelling", [None, published], ids=["transformers", "published"])
def test_text_model_in_both_notations(model, spelling, tmp_path, caplog, monkeypatch):
    """Logits within 1e-4 of the largest; one line of the log says that images are not read."""
    monkeypatch.setattr(log, "_WARNED", set())
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    # transformers writes the names of Google's files; the other notation has the names of its modules
    names = {published(name): name for name in model.state_dict()}
    tensors = load_file(path)
    assert tensors.keys() <= names.keys() | {*names.values()}
    modules = {names.get(name, name): tensor for name, tensor in tensors.items()}
    save_file({(spelling or str)(name): tensor for name, tensor in modules.items()}, path)
    ids = ids_of(40)
    ours, theirs = our_logits(tmp_path, ids), their_logits(model, ids)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
    assert np.abs(our_logits(tmp_path, ids[::-1]) - theirs).max() > 1e-2 * np.abs(theirs).max()
    (line,) = [record.getMessage() for record in caplog.records if "vision model" in record.getMessage()]
    assert "only the text model" in line
    modules["model.vision_tower_2.weight"] = torch.zeros(1)
    save_file({(spelling or str)(name): tensor for name, tensor in modules.items()}, path)
    with pytest.raises(CheckpointError, match="vision_tower_2"):
        models.open_weights(tmp_path, models.open(tmp_path))


def test_gradients_and_files_of_the_text_model(model, tmp_path):
    """The gradient of every tensor; a saved model is a text model, with equal tensors and logits."""
    model.save_pretrained(tmp_path / "theirs")
    config = models.open(tmp_path / "theirs")
    batch = batch_of(config, 2, 24)
    logits = model(torch.tensor(batch["tokens"], dtype=torch.long)).logits.float()
    labels = torch.tensor(batch["labels"], dtype=torch.long).reshape(-1)
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, config.vocab_size), labels)
    loss.backward()
    graph = training_graph(config, 2, 24)
    weights = models.open_weights(tmp_path / "theirs", config)
    with graph.instantiate(graph.plan()) as instance:
        instance.load_parameters(weights)
        instance.forward(**batch)
        instance.backward()
        assert float(instance.get_tensor("loss")[0]) == pytest.approx(loss.item(), rel=1e-4)
        names = [name for name, _ in models.parameter_shapes(config)]
        gradients = {name: np.array(instance.get_tensor(f"{name}.grad")) for name in names}
    stored = {name: np.asarray(g) for name, g in models.stored_tensors(config, gradients)}
    parts = {as_text_model(name): p for name, p in model.named_parameters() if "language_model" in name}
    assert stored.keys() == parts.keys()
    for name, p in parts.items():
        scale = max(float(p.grad.abs().max()), 1e-3)
        assert np.abs(stored[name] - p.grad.numpy()).max() <= 1e-4 * scale, name
    save_pretrained(tmp_path / "ours", config.to_dict(), models.stored_tensors(config, weights))
    assert models.open(tmp_path / "ours") == config
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert type(again).__name__ == "Gemma3ForCausalLM"
    for name, p in parts.items():
        assert torch.equal(again.state_dict()[name], p), name
    ids = ids_of(20)
    assert np.array_equal(their_logits(again, ids), their_logits(model, ids))


def test_engine_generates_text_from_files_with_images(model, tmp_path):
    """Greedy tokens are those of transformers, as long as the top logit leads clearly."""
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    train_tokenizer(["ab" * 20], vocab_size=290).save(str(tmp_path / "tokenizer.json"))
    ids = ids_of(20)
    with LLM(tmp_path, dtype="f32", max_num_seqs=1, max_model_len=64) as llm:
        settings = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        (output,) = llm.generate([ids], settings)
    tokens = list(output.outputs[0].token_ids)
    logits = their_logits(model, [*ids, *tokens[:-1]])[len(ids) - 1 :]
    best = np.sort(logits, axis=1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 1e-3
    assert clear.sum() > 6
    assert np.array_equal(np.array(tokens)[clear], logits.argmax(axis=1)[clear])
