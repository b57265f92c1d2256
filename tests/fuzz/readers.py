"""Every reader of files from outside, as a function of a folder and bytes.

A reader gets a mutated valid file, puts it where the product expects it, reads it as the product
does, and uses the result. It may succeed or raise one of our own errors in one line; any other
exception is a finding. The result is checked if possible, by another library or by a round trip.
Valid files are made here from fixed seeds.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from shutil import rmtree

import numpy as np
import safetensors.numpy
from ml_dtypes import bfloat16

import tilewise as tw
from fuzz import (
    adapter_readers,
    body_readers,
    data_readers,
    group_readers,
    quantised_readers,
    text_readers,
)
from fuzz.gguf_readers import mutate_gguf, read_gguf, read_gguf_metadata, valid_gguf, valid_gguf_metadata
from fuzz.graph_readers import graphs, mutate_graph, read_graph_file
from fuzz.mutate import Mutation, mutate, mutate_json, mutate_plan, mutate_safetensors
from fuzz.torch_readers import (
    distributed_metadata,
    read_distributed_metadata,
    read_torch_archive,
    read_torch_pickle,
    torch_archives,
    torch_pickles,
)
from tilewise import models
from tilewise.checkpoint import (
    Box,
    PartedTensor,
    TensorPart,
    TrainingState,
    load_latest,
    open_weights,
    save_checkpoint,
)
from tilewise.checkpoint.device_files import describe
from tilewise.checkpoint.header import dtype_name, parse_header
from tilewise.checkpoint.manifest import Manifest, device_file
from tilewise.checkpoint.tensors import WeightsFile
from tilewise.core import CheckpointError, ConfigError, TilewiseError
from tilewise.data import load_corpus
from tilewise.encode import load_max_length, load_pooling
from tilewise.files.reading import Unreadable
from tilewise.models.llama import LlamaConfig
from tilewise.nn import linear
from tilewise.observe import (
    DependencyGraph,
    GraphParam,
    GraphRegion,
    GraphTask,
    read_graph,
    write_graph,
    write_graph_html,
    write_graph_svg,
)
from tilewise.optim.optimizer import is_hyper
from tilewise.train.metrics import MetricsFile, read_metrics
from tilewise.train.preference import read_reference, write_reference
from tilewise.train.train_config import TrainConfig, load_config, make_optimizer

VOCABULARY = 300
SETTINGS = {"model": {"hidden_size": 32}, "train": {"seed": 0}}


@dataclass(frozen=True)
class Reader:
    """A reader and its inputs.

    Attributes:
        read: gets its own folder, with the files that it left there, and the bytes.
        seeds: valid files.
        mutation: changes one of them.
        num_in_ci: number of inputs of `make test-slow`; all readers together take about a minute.
    """

    read: Callable[[Path, bytes], None]
    seeds: Callable[[], list[bytes]]
    num_in_ci: int
    mutation: Mutation = mutate


def read_safetensors(folder: Path, data: bytes) -> None:
    """Weights: the safetensors library reads an accepted file as the same arrays."""
    file = folder / "model.safetensors"
    file.write_bytes(data)
    weights = {name: np.array(tensor) for name, tensor in open_weights(file).items()}
    arrays = {name: (dtype_name(t.dtype), list(t.shape), t.tobytes()) for name, t in weights.items()}
    expected = {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in safetensors.deserialize(data)}
    assert arrays == expected


def _safetensors() -> list[bytes]:
    rng = np.random.default_rng(0)
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((3, 4)).astype(np.float32),
        "model.norm.weight": rng.standard_normal(4).astype(bfloat16),
        "empty": np.zeros((2, 0), np.int64),
        "scalar": np.array(7, np.uint8),
    }
    return [
        safetensors.numpy.save(tensors, metadata={"format": "pt"}),
        safetensors.numpy.save({"flags": np.array([True, False]), "half": np.ones((1, 2, 2), np.float16)}),
        safetensors.numpy.save({}),
    ]


def read_weights_index(folder: Path, data: bytes) -> None:
    for number in (1, 2):
        name = folder / f"model-0000{number}-of-00002.safetensors"
        if not name.exists():
            safetensors.numpy.save_file({f"t{number}": np.arange(number), f"u{number}": np.ones(2)}, name)
    (folder / "model.safetensors.index.json").write_bytes(data)
    sizes = {name: tensor.size for name, tensor in open_weights(folder).items()}
    assert (
        sizes.items() <= {"t1": 1, "u1": 2, "t2": 2, "u2": 2}.items()
    )  # an index may name some of the files


def _weights_index() -> list[bytes]:
    files = {name: f"model-0000{name[1]}-of-00002.safetensors" for name in ("t1", "u1", "t2", "u2")}
    return [_json({"metadata": {"total_size": 56}, "weight_map": files}), _json({"weight_map": files})]


def read_model_config(folder: Path, data: bytes) -> None:
    """config.json: an accepted configuration is equal after a round trip."""
    (folder / "config.json").write_bytes(data)
    config = models.open(folder)
    assert models.num_parameters(config) > 0
    assert models.config_from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config


def _model_config() -> list[bytes]:
    plain = LlamaConfig(
        VOCABULARY,
        32,
        64,
        2,
        4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_ids=(2, 3),
        dtype="bfloat16",
    )
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    }
    llama3 = {**plain.to_dict(), "rope_scaling": {"rope_type": "llama3", **scaling}, "eos_token_id": 2}
    new = {**plain.to_dict(), "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    del new["rope_scaling"], new["rope_theta"]
    sizes = {
        k: plain.to_dict()[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    }
    others = [
        {
            "model_type": "mistral",
            **sizes,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_window": 7,
        },
        {"model_type": "qwen2", **sizes, "num_attention_heads": 4, "layer_types": ["full_attention"] * 2},
        {"model_type": "qwen3", **sizes, "num_attention_heads": 4, "head_dim": 16},
        {"model_type": "gemma2", **sizes, "num_attention_heads": 4, "attn_logit_softcapping": 50.0},
        {"model_type": "gemma3_text", **sizes, "num_attention_heads": 4, "sliding_window_pattern": 2},
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {**sizes, "model_type": "gemma3_text", "num_attention_heads": 4},
            "vision_config": {"hidden_size": 8},
            "eos_token_id": [1, 3],
        },
        {
            "model_type": "gpt2",
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 2,
            "n_inner": None,
        },
        {"model_type": "bert", **sizes, "num_attention_heads": 4, "type_vocab_size": 2},
        {
            "model_type": "phi3",
            **sizes,
            "num_attention_heads": 4,
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "su", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3},
        },
        {
            "model_type": "smollm3",
            **sizes,
            "num_attention_heads": 4,
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 7,
        },
        {"model_type": "olmo2", **sizes, "num_attention_heads": 4},
        {"model_type": "granite", **sizes, "num_attention_heads": 4, "residual_multiplier": 0.22},
    ]
    return [_json(config) for config in (plain.to_dict(), llama3, new, *others)]


def read_sentence_files(folder: Path, data: bytes) -> None:
    """The three files of a sentence-transformers directory, each mutated next to valid others."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    places = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json")
    for place, valid in zip(places, _sentence_files(), strict=True):
        (folder / place).write_bytes(valid)
    refused: list[ConfigError] = []
    for place, valid in zip(places, _sentence_files(), strict=True):
        (folder / place).write_bytes(data)
        try:
            load_pooling(folder)
            load_max_length(folder)
        except ConfigError as error:
            refused.append(error)
        (folder / place).write_bytes(valid)
    if len(refused) == len(places):
        raise refused[0]


def _sentence_files() -> list[bytes]:
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    return [_json(modules), _json(pooling), _json({"max_seq_length": 16, "do_lower_case": False})]


def read_checkpoint_metadata(folder: Path, data: bytes) -> None:
    """checkpoint.json next to the files of two devices; its digest is corrected, so that later checks run."""
    checkpoint = _fresh_checkpoint(folder)
    with suppress(ValueError):  # also of a text that UTF-8 cannot hold
        data = Manifest.model_validate_json(data).signed().content().encode()
    (checkpoint / "checkpoint.json").write_bytes(data)
    _resume(folder)


def _checkpoint_metadata() -> list[bytes]:
    return [_manifest_of(_state(3)), _manifest_of({"w": _state(3)["w"]})]


def read_device_file(folder: Path, data: bytes) -> None:
    """The second device's file; checkpoint.json is adapted to a valid one, so that later checks run."""
    checkpoint = _fresh_checkpoint(folder)
    file = checkpoint / device_file(1)
    file.write_bytes(data)
    try:
        parse_header(data)
        state = _state(3)
        for name, tensor in WeightsFile(file).items():  # next to the first device's part, or whole
            fits = name == "w" and tensor.shape == (1, 3) and tensor.dtype == np.float32
            parts = state["w"].parts[:1] if fits else ()
            shape = (2, 3) if fits else tensor.shape
            box = Box((1, 0), (1, 3)) if fits else Box.whole(tensor.shape)
            own = TensorPart(box, np.array(tensor), 1)
            state[name] = PartedTensor(shape, tensor.dtype, (*parts, own))
        (checkpoint / "checkpoint.json").write_bytes(_manifest_of(state))
    except Unreadable:
        pass
    _resume(folder)


def _state(step: int) -> dict[str, PartedTensor]:
    """The state of two devices: a matrix in rows, a whole state on the second, a step count on the first."""
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    rows = (TensorPart(Box((0, 0), (1, 3)), w[:1], 0), TensorPart(Box((1, 0), (1, 3)), w[1:], 1))
    whole = {"optimizer.exp_avg.w": (1, np.ones((2, 3), bfloat16)), "optimizer.step": (0, np.array([step]))}
    return {
        "w": PartedTensor((2, 3), w.dtype, rows),
        **{
            name: PartedTensor(array.shape, array.dtype, (TensorPart(Box.whole(array.shape), array, device),))
            for name, (device, array) in whole.items()
        },
    }


def _device_file() -> list[bytes]:
    state = _state(3)
    both = {"w": state["w"].parts[1].values, "optimizer.exp_avg.w": np.array(state["optimizer.exp_avg.w"])}
    return [safetensors.numpy.save(both), safetensors.numpy.save({})]


def _fresh_checkpoint(folder: Path) -> Path:
    """A valid checkpoint of step 2 and one of step 3 for mutation."""
    for step in (2, 3):
        if not (folder / f"step-0000000{step}").exists():
            save_checkpoint(folder, TrainingState(step, _state(step), mesh={"dp": 2}), SETTINGS)
    (folder / "step-00000003" / device_file(1)).write_bytes(_device_file()[0])
    return folder / "step-00000003"


def _manifest_of(tensors: dict[str, PartedTensor]) -> bytes:
    records = describe(tensors, 2, lambda num_bytes: None)
    return Manifest.of(3, SETTINGS, {"dp": 2}, 2, records, None).content().encode()


def _resume(folder: Path) -> None:
    """Resume a run; a damaged newest checkpoint is named, and the previous one is used."""
    reported: list[str] = []
    try:
        path, state = load_latest(folder, SETTINGS, reported.append)
    except CheckpointError as error:
        assert "must equal those of the checkpoint" in str(error), error  # another configuration
        return
    assert (path.name, state.step) in (("step-00000002", 2), ("step-00000003", 3))
    assert len(reported) == (state.step == 2) and all("\n" not in text for text in reported)
    sum(np.array(tensor).size for tensor in state.tensors.values())


def read_train_config(folder: Path, data: bytes) -> None:
    """The TOML file of a training run: an accepted configuration is equal when checked again."""
    file = folder / "train.toml"
    file.write_bytes(data)
    config = load_config(file)
    assert TrainConfig.model_validate(config.model_dump()) == config
    make_optimizer(config)
    json.dumps(config.what_must_match(), allow_nan=False)


def _train_config() -> list[bytes]:
    text = (Path(__file__).parents[2] / "examples" / "train.toml").read_bytes()
    short = b'[model]\nhidden_size = 64\n[distribution]\nstrategy = "hybrid"\nmesh = { dp = 2, tp = 2 }\n'
    return [text, short, b'train.steps = 7\noutput.directory = """out"""\n\n[data]\npath = \'stdlib\'\n']


def read_dependency_graph(folder: Path, data: bytes) -> None:
    """A recorded dependency graph: an accepted one is equal after a round trip and can be drawn."""
    file = folder / "graph.json"
    file.write_bytes(data)
    graph = read_graph(file)
    write_graph(file, graph)
    assert read_graph(file) == graph
    write_graph_html(folder / "graph.html", graph)
    write_graph_svg(folder / "graph.svg", graph)


def _dependency_graph() -> list[bytes]:
    rows = GraphRegion(64, (3, 16), (32, 1))
    tasks = (
        GraphTask(id=1, kernel="fill", params=(GraphParam("output", 1, 256),), submit_ns=5, end_ns=9),
        GraphTask(id=2, kernel="add", name="n", params=(GraphParam("inout", 1, 256, rows),), producers=(1,)),
        GraphTask(
            id=4, kernel="sum", domain=2, scope=1, depth=1, params=(GraphParam("input", 1, 256),), after=(2,)
        ),
        GraphTask(
            id=5, kernel="sum", submitter=1, params=(GraphParam("reduce", 2, 64, GraphRegion(0, (8,), (8,))),)
        ),
    )
    graph = DependencyGraph(tasks)
    one = asdict(tasks[1])
    return [
        _json({"version": 1, "tasks": [asdict(task) for task in graph.tasks]}),
        _json({"version": 1, "tasks": [one, {**one, "id": 3, "params": one["params"] * 3}]}),
        _json({"version": 1, "tasks": []}),
    ]


def read_metrics_file(folder: Path, data: bytes) -> None:
    """metrics.jsonl: a second resumed run keeps the same lines as the first."""
    file = folder / "metrics.jsonl"
    file.write_bytes(data)
    lines = read_metrics(file)
    MetricsFile(file, 3).close()
    early = [line for line in lines if line["step"] < 3]
    assert read_metrics(file) == early


def _metrics() -> list[bytes]:
    lines = [{"step": i, "loss": 2.5 - i, "grad_norm": 1.0, "seconds": 0.25 * i} for i in range(4)]
    skipped = {"step": 4, "loss": None, "seconds": 1.5}
    return [
        b"".join(_json(line) + b"\n" for line in (*lines, skipped)),
        _json(lines[0]) + b'\n{"step": 1, "lo',
    ]


def read_reference_file(folder: Path, data: bytes) -> None:
    """reference_log_probs.json: log-probabilities of all pairs, finite, or none; written again, the same."""
    file = folder / "reference_log_probs.json"
    file.write_bytes(data)
    stored = read_reference(file, "d", 2, 1)
    if stored is not None:
        assert [values.shape for values in stored] == [(2, 2), (1, 2)]
        assert all(np.isfinite(values).all() for values in stored)
        write_reference(file, "d", *stored)
        again = read_reference(file, "d", 2, 1)
        assert again is not None
        assert [values.tobytes() for values in again] == [values.tobytes() for values in stored]


def _reference() -> list[bytes]:
    whole = {"data": "d", "train": [[-1.5, -2.0], [-1e30, 0.0]], "held_out": [[-3.25, -4.0]]}
    return [_json(whole), _json({**whole, "held_out": []}), _json({**whole, "data": "e"})]


def read_texts(folder: Path, data: bytes) -> None:
    """A text file, alone and in a folder: pieces and whole file contain the same text."""
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    (texts / "a.txt").write_bytes(data)
    (texts / "b.txt").write_bytes(b"some text\n")
    (texts / "c.txt").write_bytes(b"other text\n")
    for path in (texts, texts / "a.txt"):
        corpus = load_corpus(path, 0.0)
        text = "".join(file.text for file in corpus.train if file.name.startswith("a.txt"))
        assert text in ("", data.decode("utf-8", "replace"))


def read_plan(folder: Path, data: bytes) -> None:
    """An accepted plan is equal after a round trip, can be explained, and runs."""
    file = folder / "step.plan"
    file.write_bytes(data)
    plan = tw.Plan.load(file)
    plan.save(file)
    assert tw.Plan.load(file).digest() == plan.digest()
    plan.explain()
    plan.estimate_memory_usage()
    for program in plan.programs:
        plan.traffic(program)
    with tw.GraphInstance(plan, memory_limit_bytes=1 << 26) as model:
        inputs = {t.spec.name: np.ones(t.shape, np.float32) for t in plan.graph.of_kind("input")}
        arrays = {name: value for name, value in inputs.items() if not is_hyper(name)}
        model.step(arrays, 0.1) if "step" in plan.programs else model.forward(**arrays)


def _plans() -> list[bytes]:
    plans = []
    folder = Path(tempfile.mkdtemp())
    for mesh, trains in (({}, False), ({"dp": 2}, True)):
        graph = tw.ComputeGraph("tiny")
        y = linear(graph, graph.input([4, 8], "f32", name="x", labels=[tw.BATCH, None]), "w", 4)
        if trains:
            graph.loss(graph.mean(linear(graph, y, "v", 4)))
            graph.freeze_parameters("w")
            graph.optimize(tw.optim.SGD())
        else:
            table = graph.constant(np.arange(16, dtype=np.float32).reshape(4, 4), name="table")
            graph.output(graph.add(y, table), "y")
        graph.plan(mesh, batch_splits=2, workers_per_device=1).save(folder / "a.plan")
        plans.append((folder / "a.plan").read_bytes())
    rmtree(folder)
    return plans


def _texts() -> list[bytes]:
    line = "x = 1  # ünïcode 日本 \U0001f600\r\n"
    return [line.encode() * 30, (line * 20 + "\n\n").encode() * 40, b"a" * 20000, b""]


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


READERS = {
    "safetensors": Reader(read_safetensors, cache(_safetensors), 7500, mutate_safetensors),
    "gguf": Reader(read_gguf, valid_gguf, 800, mutate_gguf),
    "gguf metadata": Reader(read_gguf_metadata, cache(valid_gguf_metadata), 800, mutate_json),
    "weights index": Reader(read_weights_index, cache(_weights_index), 6700, mutate_json),
    "config.json": Reader(read_model_config, cache(_model_config), 3300, mutate_json),
    "quantization_config": Reader(
        quantised_readers.read_quantisation,
        cache(quantised_readers.valid_quantisations),
        400,
        mutate_json,
    ),
    "quantised tensors": Reader(
        quantised_readers.read_quantised_tensors,
        cache(quantised_readers.valid_quantised_tensors),
        600,
        mutate_safetensors,
    ),
    "adapter_config.json": Reader(
        adapter_readers.read_adapter_settings, cache(adapter_readers.valid_settings), 800, mutate_json
    ),
    "adapter tensors": Reader(
        adapter_readers.read_adapter_tensors, cache(adapter_readers.valid_tensors), 600, mutate_safetensors
    ),
    "tokenizer.model": Reader(text_readers.read_pieces, cache(text_readers.valid_pieces), 500),
    "sentence files": Reader(read_sentence_files, cache(_sentence_files), 500, mutate_json),
    "generation_config.json": Reader(
        text_readers.read_generation_config, cache(text_readers.valid_generation_config), 500, mutate_json
    ),
    "tokenizer.json": Reader(
        text_readers.read_tokenizer, cache(text_readers.valid_tokenizer), 4200, mutate_json
    ),
    "tokenizer_config.json": Reader(
        text_readers.read_tokenizer_config, cache(text_readers.valid_tokenizer_config), 500, mutate_json
    ),
    "vocab.json": Reader(
        text_readers.read_vocabulary, cache(text_readers.valid_vocabulary), 400, mutate_json
    ),
    "merges.txt": Reader(text_readers.read_merges, cache(text_readers.valid_merges), 400),
    "chat template": Reader(text_readers.read_chat_template, cache(text_readers.valid_chat_template), 400),
    "passes.csv": Reader(text_readers.read_passes, cache(text_readers.valid_passes), 400),
    "layout of layers": Reader(text_readers.read_layout, cache(text_readers.valid_layouts), 400),
    "checkpoint.json": Reader(read_checkpoint_metadata, cache(_checkpoint_metadata), 1200, mutate_json),
    "device file": Reader(read_device_file, cache(_device_file), 1300, mutate_safetensors),
    "torch archive": Reader(read_torch_archive, cache(torch_archives), 500),
    "torch pickle": Reader(read_torch_pickle, cache(torch_pickles), 500),
    "distributed metadata": Reader(read_distributed_metadata, cache(distributed_metadata), 500),
    "train.toml": Reader(read_train_config, cache(_train_config), 500),
    "dependency graph": Reader(read_dependency_graph, cache(_dependency_graph), 500, mutate_json),
    "metrics.jsonl": Reader(read_metrics_file, cache(_metrics), 500, mutate_json),
    "reference log-probabilities": Reader(read_reference_file, cache(_reference), 500, mutate_json),
    "plan": Reader(read_plan, cache(_plans), 500, mutate_plan),
    "graph": Reader(read_graph_file, cache(graphs), 2000, mutate_graph),
    "body": Reader(body_readers.read_body, cache(body_readers.valid_bodies), 2000, mutate_json),
    "messages": Reader(group_readers.read_messages, cache(group_readers.valid_messages), 5000),
    "frames": Reader(group_readers.read_frames, cache(group_readers.valid_frames), 50_000),
    "texts": Reader(read_texts, cache(_texts), 450),
    "JSON lines": Reader(data_readers.read_lines, cache(data_readers.valid_lines), 1000, mutate_json),
    "compressed lines": Reader(data_readers.read_archive, cache(data_readers.valid_archives), 1000),
    "parquet": Reader(data_readers.read_parquet, cache(data_readers.valid_tables), 500),
    "conversations": Reader(
        data_readers.read_conversations, cache(data_readers.valid_conversations), 300, mutate_json
    ),
    "pairs": Reader(data_readers.read_pairs, cache(data_readers.valid_pairs), 300, mutate_json),
    "pre-tokenized ids": Reader(data_readers.read_ids, cache(data_readers.valid_ids), 300, mutate_json),
}


def _read_planted(folder: Path, data: bytes) -> None:
    """A planted bug that a search can find: four bytes in a row."""
    if b"9" in data and b"99" in data and b"999" in data and b"9999" in data:
        raise KeyError("planted")


PLANTED = Reader(_read_planted, lambda: [b'{"a": 1}'], 0, mutate_json)


def attempt(reader: Reader, folder: Path, data: bytes) -> bool:
    """Read once; returns whether the input was accepted. An error must be one line."""
    try:
        reader.read(folder, data)
    except TilewiseError as error:
        assert "\n" not in str(error), repr(error)
        return False
    return True


def inputs(reader: Reader, count: int) -> Iterator[bytes]:
    """The valid files, then `count` mutated ones, always the same."""
    seeds, rng = reader.seeds(), random.Random(0)
    yield from seeds
    for _ in range(count):
        yield reader.mutation(rng, rng.choice(seeds), seeds)
