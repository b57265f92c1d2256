"""Steps with low-rank adapters and frozen layers over a mesh equal one device to the bit."""

import numpy as np
import pytest
import small_families
from small_llama import batches, change_first, config, drop_partial

import tilewise as tw
from tilewise import models
from tilewise.checkpoint.adapters import LoraConfig, save_adapter
from tilewise.models.gpt2 import GPT2Config
from tilewise.session import verify_strategy

MESHES = [
    {"dp": 2},
    {"fsdp": 2},
    {"tp": 2},
    {"pp": 2},
    {"dp": 2, "tp": 2},
    {"fsdp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
]
SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4}


def with_adapters(model, dtype="bf16", batch=8, seq=12, **lora):
    """A training graph of a model with adapters of all its products."""
    layout = models.lora_layout(model, LoraConfig(**{"r": 4, "target_modules": "all-linear", **lora}))
    graph = tw.ComputeGraph("adapted", adapters=layout.adapters)
    models.build_training_graph(graph, model, batch, seq, dtype)
    layout.freeze_base(graph)
    graph.optimize(tw.optim.AdamW())
    return graph


def equals(graph, model, mesh, steps=2, **options):
    microbatches = 2 if "pp" in mesh else 1
    steps_of = batches(model, steps, 8, 12)
    return verify_strategy(graph, mesh, steps_of, accumulation=microbatches, lr=1e-2, **options).equal


def test_adapters_with_dropout_over_tensor_parallelism():
    """Partial values of a and b are summed like those of the weights, and masks do not depend on the mesh."""
    model = config(**SMALL, num_key_value_heads=2)
    graph = with_adapters(model, dropout=0.2)
    assert equals(graph, model, {"tp": 2})
    fault = change_first("linear:self_attn.o_proj.lora_A.weight/reduce_scatter", drop_partial)
    assert not equals(graph, model, {"tp": 2}, steps=1, change=fault)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_masks_do_not_depend_on_the_length_of_padding(mesh):
    """Steps of several lengths over a mesh, planned for any length; a plan for one length has the same bits."""
    model = config(**SMALL, num_key_value_heads=2)
    graph = with_adapters(model, dropout=0.3, seq=tw.Dim("seq", 1, 16))
    steps = [step for length in (5, 16, 12) for step in batches(model, 1, 8, length)]
    microbatches = 2 if "pp" in mesh else 1
    assert verify_strategy(graph, mesh, steps, accumulation=microbatches, lr=1e-2).equal
    losses = []
    for sizes in (None, {"seq": 12}):
        with graph.instantiate(graph.plan(sizes=sizes)) as instance:
            instance.initialize(3)
            losses.append([instance.step(steps[2], 1e-2) for _ in range(2)])
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_adapters_over_every_kind_of_mesh(mesh, dtype):
    """Llama with grouped KV heads; GPT-2, whose queries, keys and values share one a."""
    llama = config(**SMALL, num_key_value_heads=2, tie_word_embeddings=False)
    gpt2 = GPT2Config(512, 32, 64, 2, 4, max_position_embeddings=32, bos_token_id=0, eos_token_ids=(0,))
    for model in (llama, gpt2):
        assert equals(with_adapters(model, dtype, dropout=0.1, use_rslora=True), model, mesh)
    saved = with_adapters(
        llama, dtype, modules_to_save=("lm_head", "norm"), target_modules=("q_proj", "down_proj")
    )
    assert equals(saved, llama, mesh, recompute="full")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "frozen", [("embed*", "layers.0.*"), ("*norm.weight",), ("layers.1.*", "embed*")], ids=str
)
def test_frozen_layers_over_every_kind_of_mesh(mesh, frozen):
    """The first layers, norms, or the last layer are frozen; some layers have no backward pass."""
    model = config(**SMALL, num_key_value_heads=2, tie_word_embeddings=False)
    graph = tw.ComputeGraph("frozen")
    models.build_training_graph(graph, model, 8, 12)
    graph.freeze_parameters(*frozen)
    graph.optimize(tw.optim.AdamW())
    assert equals(graph, model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("family", small_families.FAMILIES)
def test_adapters_of_every_family(family, tmp_path):
    """All products of a family have adapters: two devices equal one, and a PEFT directory keeps them."""
    model = small_families.small(family)
    layout = models.lora_layout(model, LoraConfig(r=4, target_modules="all-linear", dropout=0.1))
    graph = tw.ComputeGraph(family, adapters=layout.adapters)
    models.build_training_graph(graph, model, 8, 12, "f32")
    layout.freeze_base(graph)
    graph.optimize(tw.optim.AdamW())
    trained = [t.spec.name for t in graph.freeze().trainable()]
    assert {*trained} == {*layout.shapes} and len(trained) == len(layout.shapes)
    steps = small_families.batches(model, 2, 8, 12)
    assert verify_strategy(graph, {"dp": 2, "tp": 2}, steps, lr=1e-2).equal
    values = {name: np.asarray(value) for name, value in layout.initial(3).items()}
    save_adapter(tmp_path, layout.files("base"), layout.stored(values))
    loaded = models.load_adapter(tmp_path, model)
    assert loaded.layout.adapters.keys() == layout.adapters.keys()
    assert all(np.array_equal(np.asarray(loaded.weights[name]), value) for name, value in values.items())
    if not models.is_encoder(model):
        stacked = models.stack_adapters({"a": loaded, "b": loaded})
        decoding = tw.ComputeGraph(family, adapters=stacked.adapters)
        models.build_decoding_graph(decoding, model, 8, 2, 4, "f32", gates=stacked.gates)
        assert {t.spec.name for t in decoding.freeze().of_kind("parameter")} >= {*stacked.weights}
