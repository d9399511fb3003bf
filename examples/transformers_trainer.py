"""The pair under ``transformers.Trainer``: right weight decay, checkpoints, resuming, loading.

    python examples/transformers_trainer.py

The text is the running Python's own library; the result lies in runs/transformers_trainer, a folder for each side.
About a minute on one CPU core.
"""

from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from diff_transformer import DiffTransformerForCausalLM, matched_baseline
from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.tokenizer import encode_all, load_tokenizer, train_tokenizer
from diff_transformer.model.presets import preset


class MatrixDecay(Trainer):
    """AdamW with weight decay on matrices only. Trainer's own rule spares biases and what is called a norm, and so
    would pull the four lambda vectors of each layer, and with them lambda, towards its start."""

    def get_decay_parameter_names(self, model) -> list[str]:
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]


class StopAfter(TrainerCallback):
    """Save and stop after so many steps, as a machine that is taken away would."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


class Rows(Dataset):
    """Rows of ``length`` tokens, documents one after another with the end of text between them; at most ``most``."""

    def __init__(self, documents, tokenizer, length: int, most: int | None = None):
        ids = []
        for document in encode_all(tokenizer, [document.text for document in documents]):
            ids += [*document.tolist(), tokenizer.eos_token_id]
        self.ids = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)[:most]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main(
    out: str | Path = "runs/transformers_trainer",
    steps: int = 120,
    *,
    stop_after: int | None = None,
    batch: int = 16,
    kilobytes: int = 600,
) -> dict[str, float]:
    """Train both sides and print their validation losses (nats a token).

    Args:
        steps: of the schedule. stop_after: stop there and save, as if interrupted; the next call with the same folder
            goes on from the last checkpoint. batch: rows of 128 tokens in a step. kilobytes: of text.
    """
    out = Path(out)
    corpus = load_corpus("python", max_bytes=1000 * kilobytes)
    if not (out / "tokenizer").exists():
        train_tokenizer((document.text for document in corpus.train), 1024).save_pretrained(out / "tokenizer")
    tokenizer = load_tokenizer(out / "tokenizer")
    length, losses = 128, {}
    train_rows, val_rows = Rows(corpus.train, tokenizer, length), Rows(corpus.validation, tokenizer, length, most=32)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = preset("demo", vocab_size=1024, **special)
    for name, side in (("softmax", matched_baseline(config)), ("diff", config)):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(out / name), max_steps=steps, per_device_train_batch_size=batch, learning_rate=2e-3,
            lr_scheduler_type="linear", warmup_steps=steps // 10, weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0,
            logging_steps=max(1, steps // 5), save_steps=max(1, steps // 4), save_total_limit=2, report_to="none",
            use_cpu=not torch.cuda.is_available(), seed=0,
        )  # fmt: skip
        trainer = MatrixDecay(
            DiffTransformerForCausalLM(side), arguments, train_dataset=train_rows, eval_dataset=val_rows,
            processing_class=tokenizer, callbacks=[StopAfter(stop_after)] if stop_after else None,
        )  # fmt: skip
        started = any((out / name).glob("checkpoint-*"))
        trainer.train(resume_from_checkpoint=started)
        if trainer.state.global_step < steps:
            print(f"{name:8} stopped at step {trainer.state.global_step} of {steps}; call again to go on")
            continue
        trainer.save_model(str(out / name / "model"))  # with the tokenizer
        loaded = AutoModelForCausalLM.from_pretrained(out / name / "model").eval()
        losses[name] = Trainer(loaded, arguments, eval_dataset=val_rows).evaluate()["eval_loss"]
        lambdas = [round(value, 3) for value in loaded.lambdas().tolist()]
        print(f"{name:8} validation loss {losses[name]:.3f}" + (f"  lambda by layer {lambdas}" if lambdas else ""))
    return losses


if __name__ == "__main__":
    main()
