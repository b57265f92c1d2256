"""Supervised fine-tuning compared with TRL: the same ids, the same labels, the same losses of 20 steps."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from support.chat_model import conversation, write_chat_model, write_lines
from tilewise.train import Trainer, check_config, make_plan, prepare_data

pytestmark = pytest.mark.slow
trl = pytest.importorskip("trl")

STEPS, BATCH, ACCUMULATION, CONTEXT, LR = 20, 8, 2, 96, 1e-2
CHAT = [{"messages": conversation(number)} for number in range(23)]
TEXTS = [{"prompt": f"one {n}", "completion": f" two {'ä€😀' * (n % 3)}{n}"} for n in range(20)]
TALKS = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in CHAT]
SOURCES = {
    "chat": (CHAT, "chat", {"assistant_only_loss": True}),
    "texts": (TEXTS, "prompt_completion", {}),
    "lists of messages": (TALKS, "prompt_completion", {}),
}


def prepare(folder, rows, kind):
    """A configuration and its data, with no record held out."""
    write_chat_model(folder / "model")
    path = str(write_lines(folder / "rows.jsonl", rows))
    content = {
        "model": {"path": str(folder / "model")},
        "data": {"type": kind, "path": path, "held_out_percent": 0, "context": CONTEXT},
        "train": {"steps": STEPS, "batch": BATCH, "accumulation": ACCUMULATION, "dtype": "f32"},
        "optimizer": {"lr": LR, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.01},
        "output": {"directory": str(folder / "out")},
    }
    config = check_config(content, "a test")
    return config, prepare_data(config, Console(file=io.StringIO()))


def their_trainer(folder, rows, **options):
    """TRL's trainer of the same model on the same records, in the order of `rows`."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    class InOrder(trl.SFTTrainer):
        """Records the losses of microbatches."""

        losses: list[float]

        def _get_train_sampler(self, *args):
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *args, **more):
            result = super().compute_loss(*args, **more)
            self.losses.append(float(result[0] if isinstance(result, tuple) else result))
            return result

    settings = trl.SFTConfig(
        output_dir=str(folder / "theirs"),
        max_length=CONTEXT + 1,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // ACCUMULATION,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "model" / "tokenizer.json"),
        eos_token="[end]",
        pad_token="[end]",
        chat_template=(folder / "model" / "chat_template.jinja").read_text(),
    )
    trainer = InOrder(
        model=LlamaForCausalLM.from_pretrained(folder / "model", dtype="float32"),
        args=settings,
        train_dataset=Dataset.from_list(json.loads(json.dumps(rows))),
        processing_class=tokenizer,
    )
    trainer.losses = []
    return trainer


@pytest.mark.parametrize("name", SOURCES)
def test_ids_labels_and_losses_equal_those_of_trl(tmp_path, name):
    """In fp32, with gradients accumulated over microbatches whose counted labels differ in number."""
    rows, kind, options = SOURCES[name]
    config, data = prepare(tmp_path, rows, kind)
    order = [data.batches.place(number)[1] for number in range(STEPS * BATCH)]
    theirs = their_trainer(tmp_path, [rows[index] for index in order], **options)
    for number, index in enumerate(order[: len(rows)]):
        batch = theirs.data_collator([theirs.train_dataset[number]])
        ids, labels = data.sources[0].train.examples[index]
        assert batch["input_ids"][0].tolist() == ids.tolist()
        assert batch["labels"][0].tolist()[1:] == labels.tolist()[1:]
    theirs.train()
    sums = np.array(theirs.losses).reshape(STEPS, ACCUMULATION).sum(1)
    np.testing.assert_allclose(losses(config, data), sums, rtol=0, atol=1e-4)
    assert sums[-1] < sums[0] - 0.5
    optimizer = config.optimizer.model_copy(update={"lr": LR * 1.01})
    other = losses(config.model_copy(update={"optimizer": optimizer}), data)  # the twin
    assert np.abs(other - sums).max() > 1e-3


def losses(config, data):
    """The losses of a run."""
    with Trainer(config, data, *make_plan(config)) as trainer:
        return np.array([trainer.step(number).loss for number in range(STEPS)])
