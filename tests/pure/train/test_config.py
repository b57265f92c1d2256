"""Training configurations: every key checked, every error one line."""

import os
from pathlib import Path

import pytest

from tilewise.core import ConfigError
from tilewise.optim import SGD, AdamW, Lion
from tilewise.train.lora_section import LoraSection
from tilewise.train.train_config import (
    DataSection,
    DataSource,
    DpoSection,
    OutputSection,
    TrainConfig,
    is_changeable,
    load_config,
    make_optimizer,
    setting_names,
)

ROOT = Path(__file__).parents[3]


def _write(tmp_path, text):
    path = tmp_path / "train.toml"
    path.write_text(text)
    return path


def test_example_is_valid_and_complete():
    """The example file loads, and mentions every key there is."""
    path = ROOT / "examples" / "train.toml"
    config = load_config(path)
    text = path.read_text()
    sections = [section for section in config.model_dump().values() if section is not None]
    keys = [key for section in sections for key in section if key != "sources"]
    others = [key for section in (DataSource, DpoSection, LoraSection) for key in section.model_fields]
    missing = [key for key in (*keys, *others) if key not in text]
    assert not missing


def test_key_of_an_earlier_version_is_read_with_a_warning(tmp_path, caplog):
    """`train.leaves` is `train.batch_splits` in a file and in a checkpoint's settings."""
    (tmp_path / "train.toml").write_text("[train]\nleaves = 4\n")
    assert load_config(tmp_path / "train.toml").train.batch_splits == 4
    assert "train.leaves is now called train.batch_splits" in caplog.text


def test_default_batch_splits_follow_from_the_batch(tmp_path):
    """The largest power of two up to 8 that divides the batch."""
    for batch, splits in ((1, 1), (4, 4), (6, 2), (8, 8), (12, 4), (64, 8)):
        assert load_config(_write(tmp_path, f"[train]\nbatch = {batch}\n")).train.batch_splits == splits
    path = _write(tmp_path, "[train]\nbatch_splits = 16\n")
    assert load_config(path, ["train.batch=32"]).train.batch_splits == 16
    assert load_config(_write(tmp_path, "")).train.batch_splits == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nstpes = 3\n", r"train.stpes must be a known key.*; did you mean train.steps\?"),
        ("[trian]\nsteps = 3\n", r"trian must be a known key.*; did you mean \[train\]\?"),
        ("batch = 3\n", r"did you mean train.batch\?"),
        ("[data]\nbatch = 3\n", r"did you mean train.batch\?"),
        ("[output]\nlearning_rates = 3\n", "must be a known key; got an unknown one in '.*'; correct it"),
        ("[model]\nhiden_size = 64\n", r"got model.hiden_size; did you mean model.hidden_size\?"),
        ("[model]\ntie_word_embedings = false\n", r"did you mean model.tie_word_embeddings\?"),
        ("[model]\ncontext = 64\n", r"did you mean data.context\?"),
        ("[model]\nmodel_type = 'gpt2'\nn_layers = 2\n", r"did you mean (model\.)?n_layer\?"),
        ("[model]\nnum_layers = 2\n", r"did you mean model.num_hidden_layers\?"),
        ("[optimizer]\nname = 'sgd'\nlr = 1\nbeta1 = 0.9\n", "sgd has no setting beta1; it has .*momentum"),
        ("[optimizer]\nmomentum = 0.9\n", "adamw has no setting momentum; it has .*beta1"),
        (
            "[optimizer]\nname = 'lion'\n",
            "lr has no default for lion .*; add lr .* or --set optimizer.lr=VALUE",
        ),
        ("[optimizer]\nname = 'sgd'\nlr = 1\nnesterov = 1\n", "optimizer.nesterov: .*; got 1"),
        (
            "[optimizer]\nname = 'adam'\n",
            r"optimizer.name: .*'adamw', 'sgd' or 'lion'.*; did you mean adamw\?",
        ),
        ("[optimizer]\nschedule = 'step'\n", "optimizer.schedule"),
        ("[train]\nevaluate_every = 2\n[data]\nheld_out_percent = 0\n", "evaluate_every needs held-out text"),
        ("[train]\nsteps = 'many'\n", "train.steps"),
        ("[train]\nsteps = 3\nepochs = 2.0\n", "train.epochs excludes train.steps.*; remove one of the two"),
        (
            "[train]\nearly_stopping_patience = 2\n",
            "early_stopping_patience needs evaluations.*; set train.evaluate_every",
        ),
        (
            "[optimizer]\nlr_scheduler_type = 'cosine_with_restart'\n",
            r"got 'cosine_with_restart' .*did you mean cosine_with_restarts\?",
        ),
        (
            "[optimizer]\nlr_scheduler_type = 'reduce_lr_on_plateau'\n",
            "its rate depends on evaluations",
        ),
        (
            "[optimizer]\nlr_scheduler_type = 'linear'\nschedule = 'linear'\n",
            "lr_scheduler_type excludes optimizer.schedule",
        ),
        (
            "[optimizer]\nwarmup_ratio = 0.1\nwarmup_steps = 3\n",
            "warmup_ratio excludes optimizer.warmup_steps",
        ),
        (
            "[optimizer]\nlr_scheduler_type = 'cosine_with_min_lr'\n",
            "cosine_with_min_lr must have min_lr or min_lr_rate in lr_scheduler_kwargs; got neither; set one",
        ),
        (
            "[optimizer]\nlr_scheduler_type = 'linear'\nlr_scheduler_kwargs = { power = 2 }\n",
            "linear must know each of lr_scheduler_kwargs; got power; it has no settings",
        ),
        (
            "[optimizer]\nlr_scheduler_type = 'warmup_stable_decay'\n"
            "lr_scheduler_kwargs = { num_decay_steps = 3, decay_type = 'exp' }\n",
            "decay_type must be one of",
        ),
        ("[optimizer]\nlr_scheduler_kwargs = { power = 2 }\n", "needs optimizer.lr_scheduler_type"),
        (
            "[train]\nbatch = 6\nbatch_splits = 4\n",
            "train.batch must divide by train.batch_splits, got 6 over 4 in .*; set train.batch_splits = 2, or a "
            "batch that is a multiple of 4",
        ),
        ("[output]\ndir = 'x'\n", r"did you mean output.directory\?"),
        ("[model]\nn_experts = 4\n", r"n_experts must be a field .* an unknown one; remove the key$"),
        ("[optimizer]\nname = 'AdamW8'\n", r"correct it"),
        ("[distribution]\nstrategy = 'ddp'\nmesh = { tp = 2 }\n", "must name dp"),
        ("[distribution]\nstrategy = 'magic'\n", "distribution.strategy"),
        ("[distribution]\nstrategy = 'fsdp'\nmesh = { dp = 2 }\n", "must name fsdp or dp, fsdp, got"),
        (
            "[distribution]\nstrategy = 'ddp'\nmesh = { dp = 2 }\nprefetch = 2\n",
            "prefetch needs axis fsdp in the mesh",
        ),
        (
            "[distribution]\nstrategy = 'fsdp'\nmesh = { fsdp = 2 }\nprefetch = 65\n",
            "prefetch: .* 64; got 65",
        ),
        ("[model]\nnum_attention_heads = 6\nhidden_size = 256\n", "hidden_size must divide"),
        ('[output]\ndirectory = "a\\u0000"\n', "output.directory: must be a path"),
        ("[model\n", "not TOML"),
        ("[optimizer]\nlr = inf\n", "optimizer.lr"),
        ("[model]\nrope_theta = inf\n", "rope_theta must"),
        ("[data]\ncontext = 100000000\n", "data.context"),
        ("[data]\ndocuments = 'cut'\n", "data.documents"),
        ("[data]\ncontext = 131072\n[train]\nbatch = 65536\n", "batch x data.context must be at most"),
        ("[model]\nnum_hidden_layers = 100000000\n", "num_hidden_layers must"),
        ("[train]\nseed = 100000000000000000000\n", "train.seed"),
        ("[distribution]\nstrategy = 'ddp'\nmesh = { dp = 1048576 }\n", "every axis of the mesh"),
        ("[train]\nsteps = true\n", "train.steps: .*; got True"),
        ("[train]\nsteps = 9" + "0" * 4000 + "\n", "train.steps: .*; got 9000"),
        ("[train]\ndtype = 'i32'\n", "train.dtype: must be one of bf16, f32, .*, got 'i32'"),
        ("[optimizer]\nlr = 1e400\n", "optimizer.lr: .*; got inf"),
        ("[distribution]\nstrategy = 'ddp'\nmesh = { dp = '2' }\n", "distribution.mesh.dp: .*; got '2'"),
        ("[distribution]\nworkers_per_device = 256\n", "distribution.workers_per_device: .* 255; got 256"),
        ("[data]\npath = ''\n", "data.path"),
        (
            "[train]\nrecompute = 'all'\n",
            "train.recompute: a string must be one of none, selective, full; .* got 'all'",
        ),
        ("[train]\nrecompute = ['']\n", "train.recompute: a pattern of names"),
        (
            "[train]\noffload = 'gradients'\n",
            "train.offload: .*optimizer, activations, parameters; got 'gradients'",
        ),
        ("data = 3\n", "data: .*; got 3"),
        ("[train]\nsteps = 3\nsteps = 4\n", "not TOML"),
        ("a = " + "[" * 4_000, "not TOML"),
        ("a = " + "[" * 5_000, "characters"),
        ("a." * 900 + "b = 1", "a must be a known key"),  # tomli, of Python 3.10, takes up to 1000 parts
        ("a." * 5_000 + "b = 1", "characters"),
        ("#\n" * 50_000, "larger than"),
        ('"\\u001b[2J" = 3\n', "must be a known key"),
        ("\0", "not TOML"),
        ("\ufeff[train]\n", "byte order mark"),
    ],
)
def test_errors_are_one_line_with_their_place(tmp_path, text, words):
    """A wrong key, type, value or combination is one line with place and reason."""
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(_write(tmp_path, text))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_missing_file_is_an_error(tmp_path):
    """A missing or invalid file is one clear error; a pipe is not waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"[data]\npath = 'caf\xe9'\n")
    (tmp_path / "huge").write_bytes(b"#" * (2 << 20))
    for name, words in (
        ("nowhere.toml", "no such file"),
        ("pipe", "named pipe"),
        (".", "a directory"),
        ("latin", "byte 18 is not UTF-8"),
        ("huge", "larger than"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            load_config(tmp_path / name)
        assert str(tmp_path) in str(caught.value)


def test_files_of_other_systems_are_read(tmp_path):
    """Lines may end as on Windows; an integer is accepted as a float; an empty file is all defaults."""
    path = tmp_path / "train.toml"
    path.write_bytes(b"[train]\r\nsteps = 3\r\n[optimizer]\r\nlr = 1\r\n")
    config = load_config(path)
    assert (config.train.steps, config.optimizer.lr) == (3, 1.0)
    path.write_bytes(b"")
    assert load_config(path).train == TrainConfig().train


def test_spellings_of_a_dtype_are_one_configuration(tmp_path):
    """With any spelling of the type, a checkpoint belongs to the same run."""
    texts = [f"[train]\ndtype = '{name}'\n" for name in ("f32", "fp32", "float32")]
    assert {load_config(_write(tmp_path, text)).train.dtype for text in texts} == {"f32"}
    assert (
        load_config(_write(tmp_path, "[train]\ndtype = 'bfloat16'\n")).what_must_match()
        == TrainConfig().what_must_match()
    )


def test_settings_without_effect_on_results_may_change(tmp_path):
    """They change no bit, so a checkpoint of the same run fits."""
    for text in (
        "recompute = 'full'",
        "recompute = ['layers.[0-3]', 'layers.*/silu_gate']",
        "offload = 'optimizer'",
        "accumulation = 4",
        "offload = ['parameters', 'activations']",
        "evaluate_every = 5",
    ):
        config = load_config(_write(tmp_path, f"[train]\n{text}\n"))
        assert config.train != TrainConfig().train
        assert config.what_must_match() == TrainConfig().what_must_match()


def test_paths_that_are_not_utf8_are_accepted():
    """Names are bytes to the system; a configuration made from arguments keeps them."""
    name = os.fsdecode(b"\xff")
    config = TrainConfig(
        data=DataSection(sources=(DataSource(path=name),)), output=OutputSection(directory=name)
    )
    assert (config.data.sources[0].path, config.output.directory) == (name, name) and name not in str(
        config.what_must_match()
    )


def test_paths_are_relative_to_the_file(tmp_path):
    """Relative paths of data and output start at the configuration's directory; absolute ones stay."""
    config = load_config(_write(tmp_path, "[data]\npath = 'texts'\n[output]\ndirectory = 'out'\n"))
    assert (config.data.sources[0].path, config.output.directory) == (
        str(tmp_path / "texts"),
        str(tmp_path / "out"),
    )
    config = load_config(_write(tmp_path, "[data]\npath = '/texts'\n[output]\ndirectory = '/out'\n"))
    assert (config.data.sources[0].path, config.output.directory) == ("/texts", "/out")
    config = load_config(_write(tmp_path, "[output]\noffload_directory = 'disk'\n"))
    assert config.output.offload_directory == str(tmp_path / "disk")


def test_strategy_and_output_do_not_affect_the_result():
    """The settings compared when resuming exclude devices and paths."""
    here = TrainConfig()
    there = TrainConfig.model_validate(
        {
            "distribution": {"strategy": "ddp", "mesh": {"dp": 2}},
            "output": {"directory": "elsewhere"},
            "data": {"path": "elsewhere"},
        }
    )
    assert here.what_must_match() == there.what_must_match()
    other = TrainConfig.model_validate({"optimizer": {"lr": 1e-4}})
    assert here.what_must_match() != other.what_must_match()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("train.steps=4_000", 4000),
        ("train.recompute=full", "full"),
        ("train.recompute=['layers.0', 'layers.1']", ("layers.0", "layers.1")),
        ("output.checkpoint_in_background = false", False),
        ("optimizer.lr=1e-4", 1e-4),
        ("data.path=/a dir/'x'.txt", "/a dir/'x'.txt"),
        ("distribution.mesh={ dp = 4 }", {"dp": 4}),
        ("output.directory=", "must not be empty"),
        ("train.steps=many", "train.steps: .*; got 'many'"),
        ("train.steps=3\nbatch = 4", "train.steps: "),
        ("train.step=3", r"--set; did you mean train.steps\?"),
        ("steps=3", "--set must be SECTION.KEY=VALUE"),
        ("train.steps", "--set must be SECTION.KEY=VALUE"),
    ],
)
def test_settings_of_the_command_line_override_the_file(tmp_path, setting, value):
    """A value is TOML or a string without quotes, and is checked as the file is."""
    file = "[train]\nsteps = 7\n[distribution]\nstrategy = 'ddp'\nmesh = { dp = 2 }\n"
    if isinstance(value, str) and value not in ("full", "/a dir/'x'.txt"):
        with pytest.raises(ConfigError, match=value):
            load_config(_write(tmp_path, file), [setting])
        return
    config = load_config(_write(tmp_path, file), ["train.steps=5", setting])
    name = setting.partition("=")[0].strip()
    section, key = name.split(".")
    of_source = config.data.sources[0] if name == "data.path" else None
    assert getattr(of_source or getattr(config, section), key) == value
    assert config.train.steps == (4000 if key == "steps" else 5)
    assert setting_names([setting]) == {name}


def test_optimizers_and_settings_that_a_run_may_change(tmp_path):
    """Each optimizer has the defaults of its class; a run may change its settings, but not the optimizer."""
    made = {
        name: make_optimizer(load_config(_write(tmp_path, "[optimizer]\nlr = 1e-3\n" + text)))
        for name, text in (
            ("adamw", "beta2 = 0.99\nmax_grad_norm = 0\n"),
            ("sgd", "name = 'sgd'\nmomentum = 0.5\nnesterov = true\n"),
            ("lion", "name = 'lion'\n"),
        )
    }
    assert made == {
        "adamw": AdamW(beta2=0.99, max_grad_norm=0),
        "sgd": SGD(momentum=0.5, nesterov=True),
        "lion": Lion(),
    }
    plain = TrainConfig().what_must_match()["optimizer"]
    assert plain == {"lr": 3e-3, "warmup_steps": 50, "min_lr_ratio": 0.1, "beta1": 0.9, "beta2": 0.95,
                     "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0}  # fmt: skip  # as older checkpoints
    other = {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": "linear"}}
    keys = TrainConfig.model_validate(other).what_must_match()["optimizer"]
    assert [key for key in keys if not is_changeable(f"optimizer.{key}")] == ["name"]
    assert keys["momentum"] == 0.9 and "beta1" not in keys and keys["schedule"] == "linear"
    assert is_changeable("train.steps") and not is_changeable("train.batch")
