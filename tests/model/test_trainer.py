"""The model trains under transformers' own Trainer."""

import torch
from transformers import Trainer, TrainingArguments

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.presets import preset


def test_trains_under_the_trainer(tmp_path):
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(preset("debug"))
    rows = [{"input_ids": torch.arange(16) + start, "labels": torch.arange(16) + start} for start in (5, 50)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=30, per_device_train_batch_size=2, learning_rate=1e-2, report_to="none",
        logging_steps=10, save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
