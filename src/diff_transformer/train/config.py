"""The full configuration of a run, dotted overrides, and its JSON form (saved with every run)."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from diff_transformer.checks import read_json
from diff_transformer.durable import write_whole
from diff_transformer.settings import (
    STRICT,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    assign,
    build,
    unknown,
    validate,
)

NO_CORPUS = "none"  # value of `data.corpus`
SOURCES = ("text", "needles", "recall")

Counts = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, lt=1)]


def _shares(mixture: dict[str, float]) -> dict[str, float]:
    if others := sorted({*mixture} - {*SOURCES}):
        raise ValueError(f"no source is called {others[0]!r}; the sources are {', '.join(SOURCES)}")
    if not any(mixture.values()):
        raise ValueError('give at least one share above 0, such as {"text": 1.0}')
    return mixture


def _cell(cell: tuple[int, int]) -> tuple[int, int]:
    if not 1 <= cell[1] <= cell[0]:
        raise ValueError("give a pair [N, R] of needles and cities asked for, with R from 1 to N")
    return cell


Cell = Annotated[tuple[int, int], AfterValidator(_cell)]
Cells = Annotated[tuple[Cell, ...], Field(min_length=1)]


@dataclass(config=STRICT)
class NeedleConfig:
    """Multi-needle documents in training (source "needles")."""

    # numbers of needles in a document, drawn with equal probability
    counts: Counts = (1, 2, 4)
    queries: Counts = (1, 2)  # numbers of cities that a question asks for
    questions: PositiveInt = 4  # questions at the end of a document, at most
    digits: PositiveInt = 2  # digits of a magic number


@dataclass(config=STRICT)
class RecallConfig:
    """Key-value recall in noise (source "recall")."""

    pairs: PositiveInt = 8  # key-value pairs in a row
    symbols: PositiveInt = 64  # number of keys, and of values, to draw from
    noise_symbols: int | None = None  # number of noise tokens to draw from; None for all others of the vocabulary
    questions: int = 0  # keys asked for, drawn with replacement; 0 asks for every key once
    distractors: float = 0.0  # share of the noise tokens that are keys of no pair of the row


@dataclass(config=STRICT)
class DataConfig:
    """The data of a training run."""

    # "python", a file or folder of text, JSON lines or parquet, "hub:NAME", a folder that `diff-transformer prepare`
    # made, or "none" (recall alone)
    corpus: Annotated[str, AfterValidator(os.path.expanduser)] = "python"
    # bytes of the corpus, at most; None for all of it, as of a prepared folder; "python" has 8 MB
    max_bytes: PositiveInt | None = None
    # "bpe" (trained on the corpus; a prepared folder brings its own), "bytes", or a folder or hub name
    tokenizer: str = "bpe"
    length: Annotated[int, Field(ge=2)] = 128  # tokens a row
    # share of the rows of a batch by source: "text", "needles" or "recall"
    mixture: Annotated[dict[str, Share], AfterValidator(_shares)] = field(default_factory=lambda: {"text": 1.0})
    # "tokens": mean over all labelled tokens. "sources": mean over each source's tokens, weighted by the source's
    # share; needle documents are then scored on their answers alone, which prose would otherwise outnumber
    loss: Literal["tokens", "sources"] = "tokens"
    # "joined": a token attends to everything before it in its row. "separate": only to its own document (packed
    # attention, positions from 0 in each document)
    documents: Literal["joined", "separate"] = "joined"
    needles: NeedleConfig = field(default_factory=NeedleConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)

    @property
    def shares(self) -> dict[str, float]:
        """The sources that are used, with their shares; the order is that of ``Rows.source``."""
        return {name: share for name, share in self.mixture.items() if share > 0}


@dataclass(config=STRICT)
class OptimConfig:
    """AdamW with weight decay on matrices only; linear warm-up, then linear decay."""

    lr: PositiveFloat = 1e-3  # learning rate after warm-up
    betas: tuple[Rate, Rate] = (0.9, 0.95)  # decay rates of both moments
    eps: NonNegativeFloat = 1e-8  # added to the denominator
    weight_decay: NonNegativeFloat = 0.1  # on matrices only
    warmup_steps: NonNegativeInt = 50  # steps of linear warm-up
    final_lr_ratio: NonNegativeFloat = 0.04  # the last step's learning rate as a share of `lr`
    grad_clip: NonNegativeFloat = 1.0  # largest norm of the gradient; 0 for no clipping


@dataclass(config=STRICT)
class ParallelConfig:
    """How a run is spread over processes, one per device, which torchrun starts. A resumed run may change it."""

    # "ddp": the whole model on each device; "fsdp": FSDP2; "auto": "fsdp" if a setting below needs it, else "ddp"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    tensor_parallel: PositiveInt = 1  # processes that share each layer by heads; the others share the rows of a batch
    context_parallel: PositiveInt = 1  # processes that share each row; multiplies with `tensor_parallel`
    # with "fsdp": copies of the sharded model (HSDP), such as one for each machine
    replicas: PositiveInt = 1
    # end the run, naming the slowest process, if none makes progress for this long; 0 for never
    stall_seconds: NonNegativeFloat = 600.0


@dataclass(config=STRICT)
class TrainConfig:
    """How a run trains, logs and saves."""

    # folder of a model or of a finished run to start from; None for random weights
    initial_model: str | None = None
    # which are trained, the others stay as they start: "all", those of "attention", "lora" (low-rank adapters of its
    # matrices, which the saved model has merged; lambda and norms of attention) or "dex" (what DEX trains)
    weights: Literal["all", "attention", "lora", "dex"] = "all"
    lora_rank: PositiveInt = 16  # of the adapters; their scale is 2
    steps: PositiveInt = 1000  # optimizer steps
    batch_size: PositiveInt = 16  # rows per step, over all processes and passes
    # rows per forward pass and process; memory grows with it; 0 for the process's whole share of the batch
    micro_batch_size: NonNegativeInt = 0
    precision: Literal["32-true", "bf16-mixed"] = "32-true"  # weights and optimizer are in fp32
    seed: Seed = 0  # of the initial weights, the rows and their order
    log_every: PositiveInt = 10  # steps between two log lines
    validate_every: PositiveInt = 200  # steps between two validations
    validation_rows: PositiveInt = 64  # held-out rows, at most
    checkpoint_every: PositiveInt = 200  # steps between two checkpoints
    checkpoint_keep: PositiveInt = 2  # newest checkpoints to keep
    checkpoint_async: bool = False  # write in the background; needs main memory for one more state
    # recomputed in the backward pass: "none", "selective" (all but products and attention) or "full"
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    compile: bool = False  # compile each layer (torch.compile)
    threads: NonNegativeInt = 0  # CPU threads, which affect rounding; 0 for PyTorch's choice
    loss_chunk: NonNegativeInt = 0  # tokens whose logits are held at a time; 0 for all
    wandb: bool = False  # send the metrics to Weights & Biases too, with its own environment variables
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def rows_of_a_pass(self, processes: int = 1) -> int:
        """Rows of a forward and backward pass, at most, of each of ``processes`` that share the rows of a batch."""
        share = self.batch_size // processes
        passes = -(-share // self.micro_batch_size) if self.micro_batch_size else 1
        return -(-share // passes)


@dataclass(config=STRICT)
class EvaluationConfig:
    """The experiments that ``compare`` runs on each trained model."""

    # cells (N, R) of Table 2
    needles: Cells = ((1, 1), (2, 1), (4, 1), (4, 2))
    needle_lengths: tuple[int, ...] = ()  # tokens of the prompts of Table 2; () for `data.length`
    samples: PositiveInt = 40  # prompts a cell, length and depth of Table 2
    allocation_samples: PositiveInt = 20  # prompts a depth of Table 3
    loss_rows: PositiveInt = 256  # held-out rows for the loss and its slices
    outlier_rows: PositiveInt = 64  # held-out rows for Table 5
    throughput_repeats: PositiveInt = 7  # timed repeats of each side
    # steps of small models trained on key-value recall alone, one beside each model (about 0.05 s a step); 0 for none
    recall_steps: NonNegativeInt = 0
    # further experiments by name, each with the settings that differ from `diff-transformer eval NAME --quick`; corpus,
    # length and seed are those of the run
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: Seed = 0  # of prompts, and of held-out rows that are drawn


@dataclass(config=STRICT)
class RunConfig:
    """Everything that determines a run."""

    name: str
    model: dict[str, Any]  # fields of `DiffTransformerConfig`
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def save(self, path: Path) -> None:
        """Write the configuration as JSON, atomically."""
        write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """The inverse of ``to_dict``. Settings that are left out get their defaults.

        Raises:
            UserError: for a setting that does not exist, naming the nearest, or a value that it does not accept.
        """
        return build(cls, {**values, "model": checked_model(values.get("model", {}))})

    @classmethod
    def load(cls, path: Path) -> "RunConfig":
        """Read what ``save`` wrote; raises as ``from_dict``."""
        return cls.from_dict(read_json(path))


def override(config: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """A copy of ``config`` with ``["optim.lr=1e-3", "data.mixture.text=0.5", ...]`` applied; values are JSON or text.

    Raises:
        UserError: for an assignment without ``=``, a key that does not exist (naming the nearest that does), or a
            value that the setting does not accept.
    """
    values = config.to_dict()
    assigned = assign(values, assignments, open_ended=("model.*", "data.mixture.*", "evaluation.more.*"))
    config = RunConfig.from_dict(values)
    if "data.corpus" in assigned and "model.vocab_size" not in assigned and "vocab_size" in config.model:
        from diff_transformer.data.tokenizer import ids_in_rows
        from diff_transformer.data.tokens import is_prepared, load_prepared_tokenizer

        if is_prepared(config.data.corpus):  # whose tokenizer decides
            config.model["vocab_size"] = ids_in_rows(load_prepared_tokenizer(config.data.corpus))
    return config


def checked_model(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of ``DiffTransformerConfig`` of the types that it declares; UserError for another field or type."""
    from diff_transformer.model.config import DiffTransformerConfig

    types = {name: field.type for name, field in DiffTransformerConfig.__dataclass_fields__.items()}
    for key in fields:
        if key not in types:
            raise unknown(f"model.{key}", [f"model.{name}" for name in types])
    return {key: validate(types[key], value, f"model.{key}") for key, value in fields.items()}
