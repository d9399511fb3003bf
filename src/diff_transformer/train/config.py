"""The full configuration of a run, dotted overrides, and its JSON form (saved with every run)."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from diff_transformer.checks import MAX_SEED, read_json
from diff_transformer.durable import write_whole
from diff_transformer.errors import UserError
from diff_transformer.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    as_kind,
    assign,
    build,
    check_rules,
    current_name,
    fit_kinds,
    one_of,
    unknown,
)
from diff_transformer.train.data_config import DataConfig

_ROUNDED = "its weights are in 16 bits, which round away updates as small as optim.lr (nothing keeps them in fp32)"
UNTRAINABLE = {  # precisions of Fabric -> why a run cannot use them
    "bf16-true": _ROUNDED,
    "16-true": _ROUNDED,
    "16-mixed": "it scales the loss, with which gradients cannot be clipped here, and no checkpoint holds the scale",
}
_PRECISIONS = ("32-true", "bf16-mixed", "64-true")
_PRECISION = Rule(lambda name: name in (*_PRECISIONS, *UNTRAINABLE), f"accepted: {', '.join(_PRECISIONS)}")
_SEED = Rule(lambda seed: 0 <= seed <= MAX_SEED, f"give a whole number from 0 to {MAX_SEED}")
_THREADS = Rule(lambda count: count >= 0, "give 0 for PyTorch's own choice, or a count")
_BETAS = Rule(lambda betas: all(0 <= beta < 1 for beta in betas), "give two numbers from 0 up to, but not, 1")
_ASKED = Rule(
    lambda cells: all(1 <= asked <= count for count, asked in cells),
    "give pairs [N, R] of needles and cities asked for, with R from 1 to N",
)


@dataclass
class OptimConfig:
    """AdamW with weight decay on matrices only; linear warm-up, then linear decay."""

    lr: PositiveFloat = 1e-3  # learning rate after warm-up
    betas: Annotated[tuple[float, float], _BETAS] = (0.9, 0.95)  # decay rates of both moments
    eps: NonNegativeFloat = 1e-8  # added to the denominator
    weight_decay: NonNegativeFloat = 0.1  # on matrices only
    warmup_steps: NonNegativeInt = 50  # steps of linear warm-up
    final_lr_ratio: NonNegativeFloat = 0.04  # the last step's learning rate as a share of `lr`
    grad_clip: NonNegativeFloat = 1.0  # largest norm of the gradient; 0 for no clipping


@dataclass
class ParallelConfig:
    """How a run is spread over processes, one per device. A resumed run may change it, up to rounding of the losses."""

    # "single", "ddp", "fsdp" (FSDP2), or "auto": "fsdp" with tensor parallel, else "ddp", "single" for one process
    strategy: Annotated[str, one_of("auto", "single", "ddp", "fsdp")] = "auto"
    tensor_parallel: PositiveInt = 1  # processes that share each layer by heads; the others share the rows of a batch
    context_parallel: PositiveInt = 1  # processes that share each row; multiplies with `tensor_parallel`
    # "gather" the keys and values of the row, or exchange tokens for "heads"
    context_parallel_method: Annotated[str, one_of("gather", "heads")] = "gather"
    # with "fsdp": copies of the sharded model (HSDP), such as one for each machine
    replicas: PositiveInt = 1
    devices: NonNegativeInt = 0  # processes on this machine; 0 for what torchrun starts, or one
    num_nodes: NonNegativeInt = 0  # machines; 0 for what torchrun starts, or one
    # with "fsdp": each process writes, hashes and checks its part of a checkpoint instead of sending it to rank 0
    sharded_checkpoints: bool = False
    # end the run, naming the slowest process, if none makes progress for this long; 0 for never
    stall_seconds: NonNegativeFloat = 600.0

    def validate(self) -> None:
        """Raise ValueError for values that contradict each other. ``launch.check_processes`` checks their number."""
        if self.replicas > 1 and self.strategy in ("single", "ddp"):
            raise UserError(
                f"train.parallel.replicas is {self.replicas}, which needs strategy 'fsdp', not {self.strategy!r}, "
                f"under which every process has a copy of the model"
            )
        if self.sharded_checkpoints and self.strategy in ("single", "ddp"):
            raise UserError(
                f"train.parallel.sharded_checkpoints needs strategy 'fsdp', not {self.strategy!r}, under which every "
                f"process has the whole model"
            )


@dataclass
class TrainConfig:
    """How a run trains, logs and saves."""

    # folder of a model or of a finished run to start from; None for random weights
    initial_model: str | None = None
    # which are trained, the others stay as they start: "all", those of "attention", or "lora": lambda and norms of
    # attention, and low-rank adapters of its matrices, which the saved model has merged
    weights: Annotated[str, one_of("all", "attention", "lora")] = "all"
    lora_rank: PositiveInt = 16  # of the adapters; their scale is 2
    steps: PositiveInt = 1000  # optimizer steps
    batch_size: PositiveInt = 16  # rows per step, over all processes and passes
    # rows per forward pass and process; memory grows with it; 0 for the process's whole share of the batch
    micro_batch_size: NonNegativeInt = 0
    accumulate: PositiveInt = 1  # passes per step, instead of `micro_batch_size`
    # "32-true", "bf16-mixed" (weights and optimizer in fp32) or "64-true"
    precision: Annotated[str, _PRECISION] = "32-true"
    seed: Annotated[int, _SEED] = 0  # of the initial weights, the rows and their order
    log_every: PositiveInt = 10  # steps between two log lines
    validate_every: PositiveInt = 200  # steps between two validations
    validation_rows: PositiveInt = 64  # held-out rows, at most
    checkpoint_every: PositiveInt = 200  # steps between two checkpoints
    checkpoint_keep: PositiveInt = 2  # newest checkpoints to keep
    checkpoint_best: bool = True  # also keep the one with the lowest validation loss
    checkpoint_async: bool = False  # write in the background; needs main memory for one more state
    # recomputed in the backward pass: "none", "selective" (all but products and attention), "full", or "auto", the
    # first of these that fits the device's memory
    activation_checkpointing: Annotated[str | bool, one_of("auto", "none", "selective", "full")] = "none"
    compile: bool = False  # compile each layer (torch.compile)
    # repeat bit for bit on a GPU too: attention's two-pass backward and PyTorch's deterministic algorithms
    deterministic: bool = False
    threads: Annotated[int, _THREADS] = 0  # CPU threads, which affect rounding; 0 for PyTorch's choice
    loss_chunk: NonNegativeInt = 0  # tokens whose logits are held at a time; 0 for all
    prefetch: NonNegativeInt = 2  # batches prepared ahead; 0 for none
    peak_flops: NonNegativeFloat = 0.0  # peak FLOP/s of a device, for MFU; 0 for the known or measured value
    wandb: bool = False  # send the metrics to Weights & Biases too, with its own environment variables
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_rows: InitVar[int | None] = None  # deprecated name of `micro_batch_size`

    def __post_init__(self, micro_rows: int | None) -> None:
        if micro_rows is not None:
            self.micro_batch_size = micro_rows
            current_name("train.micro_rows", RENAMED)
        if isinstance(self.activation_checkpointing, bool):
            self.activation_checkpointing = "full" if self.activation_checkpointing else "none"

    def rows_of_a_pass(self, processes: int = 1) -> int:
        """Rows of a forward and backward pass, at most, of each of ``processes`` that share the rows of a batch."""
        share = self.batch_size // processes
        passes = -(-share // self.micro_batch_size) if self.micro_batch_size else self.accumulate
        return -(-share // passes)


@dataclass
class EvaluationConfig:
    """The experiments that ``compare`` runs on each trained model."""

    # cells (N, R) of Table 2
    needles: Annotated[tuple[tuple[int, int], ...], _ASKED] = ((1, 1), (2, 1), (4, 1), (4, 2))
    needle_lengths: tuple[int, ...] = ()  # tokens of the prompts of Table 2; () for `data.length`
    samples: PositiveInt = 40  # prompts a cell, length and depth of Table 2
    allocation_needles: PositiveInt = 1  # needles in a prompt of Table 3
    allocation_samples: PositiveInt = 20  # prompts a depth of Table 3
    loss_rows: PositiveInt = 256  # held-out rows for the loss and its slices
    ngram: PositiveInt = 2  # tokens of an n-gram whose repetition is an AR-Hit
    frequent_share: float = 6e-5  # an n-gram with a larger share of the training text is no AR-Hit
    outlier_rows: PositiveInt = 64  # held-out rows for Table 5
    throughput_repeats: PositiveInt = 7  # timed repeats of each side
    # steps of small models trained on key-value recall alone, one beside each model (about 0.05 s a step); 0 for none
    recall_steps: NonNegativeInt = 0
    # further experiments by name, each with the settings that differ from `diff-transformer eval NAME --quick`; corpus,
    # length and seed are those of the run
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: Annotated[int, _SEED] = 0  # of prompts, and of held-out rows that are drawn


RENAMED = {"train.micro_rows": "train.micro_batch_size"}  # deprecated key -> key
REMOVED = ("data.seed",)  # keys of older files that never had an effect
_OPEN = ("model.*", "data.mixture.*", "evaluation.more.*")  # keys that --set may add


@dataclass
class RunConfig:
    """Everything that determines a run."""

    name: str
    model: dict[str, Any]  # fields of `DiffTransformerConfig`
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def validate(self) -> "RunConfig":
        """Raise ValueError for values out of range and for values that contradict each other; return the config."""
        fit_kinds(self)
        check_rules(self)
        if self.train.batch_size % self.train.accumulate:
            raise UserError(
                f"train.batch_size {self.train.batch_size} is not divisible by train.accumulate {self.train.accumulate}"
            )
        if self.train.micro_batch_size and self.train.accumulate > 1:
            raise UserError(
                f"train.micro_batch_size is {self.train.micro_batch_size} and train.accumulate "
                f"{self.train.accumulate}, which both say how many passes a step takes; set train.micro_batch_size=0 "
                f"or train.accumulate=1"
            )
        if self.train.precision in UNTRAINABLE:
            raise UserError(
                f"train.precision is {self.train.precision!r}, which does not train: "
                f"{UNTRAINABLE[self.train.precision]}; give 'bf16-mixed' or '32-true'"
            )
        self.train.parallel.validate()
        if self.train.weights == "lora":
            self._check_lora()
        pieces = 2 * self.train.parallel.context_parallel
        if pieces > 2 and self.data.length % pieces:
            raise UserError(
                f"data.length is {self.data.length}; train.parallel.context_parallel {pieces // 2} cuts a row into "
                f"{pieces} equal pieces, so give a multiple of {pieces}"
            )
        return self

    def _check_lora(self) -> None:
        parallel = self.train.parallel
        if parallel.strategy == "fsdp" or parallel.tensor_parallel > 1 or parallel.replicas > 1:
            raise UserError(
                "train.weights is 'lora', which trains with one process or strategy 'ddp', not sharded; leave "
                "sharding out, or give train.weights=attention"
            )

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def save(self, path: Path) -> None:
        """Write the configuration as JSON, atomically."""
        write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """The inverse of ``to_dict``; raises as ``load``."""
        return build(cls, values, renamed=RENAMED, removed=REMOVED)

    @classmethod
    def load(cls, path: Path) -> "RunConfig":
        """Read what ``save`` wrote. Settings that the file does not have get their defaults.

        Raises:
            ValueError: for a setting that does not exist, naming the nearest.
        """
        return cls.from_dict(read_json(path))


def override(config: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """A copy of ``config`` with ``["optim.lr=1e-3", "data.mixture.text=0.5", ...]`` applied; values are JSON or text.

    Raises:
        ValueError: for an assignment without ``=``, a key that does not exist (naming the nearest that does), or a
            value of another type than the key's.
    """
    values = config.to_dict()
    assigned = assign(values, assignments, example="optim.lr=1e-3", open_ended=_OPEN, renamed=RENAMED)
    for key in assigned:
        if key.startswith("model.") and key.removeprefix("model.") not in config.model:
            _check_model_field(key)
    config = RunConfig.from_dict(values)
    if any(key.startswith("model") for key in assigned):
        config.model = checked_model(config.model)
    if any(key.startswith("data.corp") for key in assigned) and "model.vocab_size" not in assigned:
        from diff_transformer.train.text import prepared_vocabulary

        if (size := prepared_vocabulary(config.data)) is not None and "vocab_size" in config.model:
            config.model["vocab_size"] = size  # the folder's tokenizer decides
    return config


def _check_model_field(key: str) -> None:
    from diff_transformer.model.config import DiffTransformerConfig

    known = [f"model.{name}" for name in sorted(DiffTransformerConfig.__dataclass_fields__)]
    if key not in known:
        raise unknown(key, known)


def checked_model(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of ``DiffTransformerConfig``, of the kinds that it declares; ValueError for a value of another kind."""
    from diff_transformer.model.config import DiffTransformerConfig

    kinds = {name: field.type for name, field in DiffTransformerConfig.__dataclass_fields__.items()}
    return {key: as_kind(kinds.get(key, Any), value, f"model.{key}") for key, value in fields.items()}
