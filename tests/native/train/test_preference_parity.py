"""Losses of runs on pairs, compared with those of TRL's DPOTrainer and of its formula in PyTorch."""

import json

import numpy as np
import pytest

from native.train.small_pairs import dpo_config, write_base_model, write_pairs
from native.train.small_run import silent
from tilewise.train import Trainer, make_plan, prepare_data

pytestmark = pytest.mark.slow
STEPS, BATCH, LR = 20, 4, 1e-3


@pytest.fixture(scope="module")
def base(tmp_path_factory, texts):
    """A small model, and pairs of texts of many lengths."""
    directory = write_base_model(tmp_path_factory.mktemp("base"), texts)
    rng = np.random.default_rng(1)
    words = ["return", "x", "function", "def", "+", "one", "(", "12"]

    def text(least, most):
        return "".join(f" {word}" for word in rng.choice(words, rng.integers(least, most)))

    pairs = [
        {"prompt": text(1, 5), "chosen": text(1, 8), "rejected": text(1, 8)} for _ in range(STEPS * BATCH)
    ]
    write_pairs(directory, pairs)
    return directory


def _ours(base, directory, dpo):
    """Losses of our steps, and the pairs of each step: ids and number of prompt tokens."""
    directory.mkdir(exist_ok=True)
    config = dpo_config(base, directory, dpo=dpo, held_out_percent=0.0, steps=STEPS)
    data = prepare_data(config, silent())
    assert data.batches.num_windows == STEPS * BATCH
    with Trainer(config, data, *make_plan(config)) as trainer:
        trainer.prepare_reference(directory / "reference.json", silent(), may_read=False)
        losses = [trainer.step(number).loss for number in range(STEPS)]
    pairs = [data.batches.place(number)[1] for number in range(STEPS * BATCH)]
    return np.array(losses), pairs


def _ids(row):
    """Prompt and completion of a sequence."""
    tokens, labels = row
    begin = int(np.argmax(labels != -100)) + 1
    return tokens[:begin].tolist(), labels[begin - 1 :].tolist()


def _rows(pairs):
    """Pairs as TRL has them after tokenizing."""
    rows = []
    for chosen, rejected in pairs:
        (prompt, own), (other_prompt, other) = _ids(chosen), _ids(rejected)
        assert prompt == other_prompt
        rows.append({"prompt_ids": prompt, "chosen_ids": own, "rejected_ids": other})
    return rows


def _trl_trainer(base, directory, rows, losses, **dpo):
    """TRL's trainer, which visits the rows in their order and appends the loss of each step."""
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class Recorder(DPOTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            if "prompt_ids" in dataset.column_names:
                return dataset
            return super()._prepare_dataset(dataset, *args, **kwargs)

        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    tokenizer = AutoTokenizer.from_pretrained(base / "model")
    tokenizer.pad_token = tokenizer.eos_token = "<|endoftext|>"
    arguments = DPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        report_to="none",
        use_cpu=True,
        bf16=False,
        precompute_ref_log_probs=False,
        disable_dropout=True,
        save_strategy="no",
        **dpo,
    )
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    return Recorder(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_losses_of_twenty_steps_equal_those_of_trl(base, tmp_path, loss_type):
    """In f32 within 1e-4, and not with another beta: the same pairs, reference, optimizer and clipping."""
    losses, pairs = _ours(base, tmp_path, {"loss_type": loss_type})
    recorded = []
    _trl_trainer(base, tmp_path, _rows(pairs), recorded, loss_type=[loss_type], beta=0.1).train()
    expected = np.array(recorded)
    tolerance = 1e-4 * max(1.0, float(expected.max()))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=tolerance)
    other, _ = _ours(base, tmp_path / "other", {"loss_type": loss_type, "beta": 0.11})
    assert np.abs(other - expected).max() > 10 * tolerance


def test_texts_become_the_ids_of_trl(base, tmp_path):
    """Prompts, completions and the end id, for pairs of texts in the order of their file."""
    lines = [json.loads(line) for line in (base / "pairs.jsonl").read_text().splitlines()]
    dataset = _trl_trainer(base, tmp_path, lines, []).train_dataset
    config = dpo_config(base, tmp_path, held_out_percent=0.0)
    source = prepare_data(config, silent()).batches.batches.sources[0]
    ours = _rows([source.pair(number) for number in range(len(lines))])
    assert ours == [{name: row[name] for name in ours[0]} for row in dataset]
