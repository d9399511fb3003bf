"""The full configuration of a run, dotted overrides, and its JSON form (saved with every run)."""

import dataclasses
import json
from dataclasses import InitVar, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from diff_transformer.checks import read_json, require_positive, require_seed
from diff_transformer.durable import write_whole
from diff_transformer.settings import as_kind, assign, build, current_name, unknown
from diff_transformer.train.data_config import DataConfig
from diff_transformer.train.loggers import check_loggers


@dataclass
class OptimConfig:
    """AdamW with weight decay on matrices only; linear warm-up, then linear decay."""

    lr: float = 1e-3  # learning rate after warm-up
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the means of gradients and of their squares
    eps: float = 1e-8  # added to the root of the mean of squares
    weight_decay: float = 0.1  # of matrices; other weights have none
    warmup_steps: int = 50  # steps of linear warm-up
    final_lr_ratio: float = 0.04  # the last step's learning rate as a share of `lr`
    grad_clip: float = 1.0  # norm of the gradient, at most; 0 for no clipping


STRATEGIES = ("auto", "single", "ddp", "fsdp")
CONTEXT_METHODS = ("gather", "heads")


@dataclass
class ParallelConfig:
    """How a run is spread over processes, one per device. A resumed run may change it, up to rounding of the losses."""

    # "single", "ddp", "fsdp" (FSDP2), or "auto": "fsdp" with tensor parallel, else "ddp", "single" for one process
    strategy: str = "auto"
    tensor_parallel: int = 1  # processes that share each layer by heads; the others share the rows of a batch
    context_parallel: int = 1  # processes that share each row; with `tensor_parallel`, times as many
    # how those see the whole row: "gather" its keys and values, or exchange tokens for "heads"
    context_parallel_method: str = "gather"
    # with "fsdp": copies of the sharded model (HSDP); the processes of a copy, such as those of a machine, share it
    replicas: int = 1
    devices: int = 0  # processes on this machine; 0 for what torchrun starts, or one
    num_nodes: int = 0  # machines; 0 for what torchrun starts, or one
    # with "fsdp": each process writes, hashes and checks its part of a checkpoint instead of sending it to rank 0
    sharded_checkpoints: bool = False
    # end the run and name the process that holds up the others if none makes progress for this long; 0 for never
    stall_seconds: float = 600.0

    def validate(self) -> None:
        """Raise ValueError for invalid values. ``launch.check_processes`` checks the number of processes."""
        ways = {name: getattr(self, name) for name in ("tensor_parallel", "context_parallel", "replicas")}
        require_positive(**{f"train.parallel.{name}": size for name, size in ways.items()})
        if self.context_parallel_method not in CONTEXT_METHODS:
            raise ValueError(
                f"train.parallel.context_parallel_method is {self.context_parallel_method!r}; accepted: "
                f"{', '.join(map(repr, CONTEXT_METHODS))}"
            )
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"train.parallel.strategy is {self.strategy!r}; accepted: {', '.join(map(repr, STRATEGIES))}"
            )
        for name in ("devices", "num_nodes", "stall_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.parallel.{name} is {getattr(self, name)}; it must not be negative")
        if self.replicas > 1 and self.strategy in ("single", "ddp"):
            raise ValueError(
                f"train.parallel.replicas is {self.replicas}, which needs strategy 'fsdp', not {self.strategy!r}, "
                f"under which every process has a copy of the model"
            )
        if self.sharded_checkpoints and self.strategy in ("single", "ddp"):
            raise ValueError(
                f"train.parallel.sharded_checkpoints needs strategy 'fsdp', not {self.strategy!r}, under which every "
                f"process has the whole model"
            )


@dataclass
class TrainConfig:
    """How a run trains, logs and saves."""

    # folder of a saved model, or of a finished run, whose weights the run starts from; None for random weights
    initial_model: str | None = None
    steps: int = 1000  # of the optimizer
    batch_size: int = 16  # rows of a step, over all processes and passes
    micro_batch_size: int = 0  # rows of a forward and backward pass of a process, at most; 0 for its part of the batch
    accumulate: int = 1  # number of passes of a step, instead of `micro_batch_size`
    precision: str = "32-true"  # "32-true", "bf16-mixed" (weights and optimizer in fp32) or "64-true"
    # matrix products of the layers in float8 (torchao), on GPUs that have it; emulated, slowly, on the CPU
    float8: bool = False
    seed: int = 0  # of the weights, and of the rows and their order
    log_every: int = 10  # steps between two lines of the log
    validate_every: int = 200  # steps between two validations
    validation_rows: int = 64  # held-out rows, at most
    checkpoint_every: int = 200  # steps between two checkpoints
    checkpoint_keep: int = 2  # number of newest checkpoints that stay
    checkpoint_best: bool = True  # whether the checkpoint with the lowest validation loss stays too
    checkpoint_async: bool = False  # write checkpoints in the background; needs main memory for one more state
    # what a layer recomputes in the backward pass: "none", "selective" (all but products and attention), "full", or
    # "auto", the first of these that fits the device's memory; true means "full", false "none"
    activation_checkpointing: str | bool = "none"
    compile: bool = False  # each layer by torch.compile
    # repeat bit for bit on a GPU too: attention's two-pass backward, and PyTorch's deterministic algorithms, which warn
    # where an operator has none; false takes the one-pass backward of attention where it was measured to be faster
    deterministic: bool = False
    threads: int = 0  # of the CPU, which affect rounding; 0 for PyTorch's choice
    loss_chunk: int = 0  # tokens whose logits are held at a time; 0 for all
    prefetch: int = 2  # batches prepared ahead, in a thread; 0 for none
    peak_flops: float = 0.0  # FLOP/s of a device, for MFU; 0 for the known or measured value
    loggers: tuple[str, ...] = ()  # "wandb", "mlflow": services that get the metrics too
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
    """What ``compare`` measures on each trained model."""

    needles: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (4, 1), (4, 2))  # cells (N, R) of Table 2
    needle_lengths: tuple[int, ...] = ()  # tokens of the prompts of Table 2; () for `data.length`
    samples: int = 40  # prompts a cell, length and depth of Table 2
    allocation_needles: int = 1  # needles in a prompt of Table 3
    allocation_samples: int = 20  # prompts a depth of Table 3
    loss_rows: int = 256  # held-out rows for the loss and its slices
    ngram: int = 2  # tokens of an n-gram whose repetition is an AR-Hit
    frequent_share: float = 6e-5  # an n-gram with a larger share of the training text is no AR-Hit
    outlier_rows: int = 64  # held-out rows for Table 5
    throughput_repeats: int = 7  # timed repeats of each side
    # steps of small models trained on key-value recall alone, one beside each model (about .05 s a step); 0 for none
    recall_steps: int = 0
    # further experiments by name, each with the settings that differ from `diff-transformer eval NAME --quick`; corpus,
    # length and seed are those of the run
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: int = 0  # of prompts, and of held-out rows that are drawn


PRECISIONS = ("32-true", "bf16-mixed", "64-true")
_ROUNDED = "its weights are in 16 bits, which round away updates as small as optim.lr (nothing keeps them in fp32)"
UNTRAINABLE = {  # precisions of Fabric -> why a run cannot use them
    "bf16-true": _ROUNDED,
    "16-true": _ROUNDED,
    "16-mixed": "it scales the loss, with which gradients cannot be clipped here, and no checkpoint holds the scale",
}
FLOAT8_MULTIPLE = 16  # of the sizes of matrices that GPUs multiply in float8
RENAMED = {"train.micro_rows": "train.micro_batch_size"}  # deprecated key -> key
REMOVED = ("data.seed",)  # keys of older files that never had an effect
_OPEN = ("model.*", "data.mixture.*", "evaluation.more.*")  # keys that --set may add
_POSITIVE = (
    "data.length", "data.upsample_factor", "data.max_bytes", "data.needles.digits", "data.needles.questions",
    "data.recall.pairs", "data.recall.symbols", "optim.lr", "train.steps", "train.batch_size", "train.accumulate",
    "train.log_every", "train.validate_every", "train.validation_rows", "train.checkpoint_every",
    "train.checkpoint_keep", "evaluation.ngram", "evaluation.samples", "evaluation.allocation_samples",
    "evaluation.allocation_needles", "evaluation.loss_rows", "evaluation.outlier_rows",
    "evaluation.throughput_repeats",
)  # fmt: skip
_NOT_NEGATIVE = (
    "evaluation.recall_steps", "optim.eps", "optim.weight_decay", "optim.warmup_steps", "optim.grad_clip",
    "optim.final_lr_ratio",
    "train.micro_batch_size", "train.loss_chunk", "train.prefetch", "train.peak_flops",
)  # fmt: skip
_CHOICES = {
    "data.loss": ("tokens", "sources"),
    "data.documents": ("joined", "separate"),
    "train.activation_checkpointing": ("auto", "none", "selective", "full"),
}


def _shares(mixture: dict[str, float]) -> bool:
    return any(mixture.values()) and all(share >= 0 for share in mixture.values())


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
        require_positive(**{key: attrgetter(key)(self) for key in _POSITIVE})
        self._check_ranges()
        for key, accepted in _CHOICES.items():
            value = attrgetter(key)(self)
            if value not in accepted:
                raise ValueError(f"{key} is {value!r}; accepted: {', '.join(map(repr, accepted))}")
        if self.data.upsample_length < 0:
            raise ValueError(f"data.upsample_length is {self.data.upsample_length}; give tokens, or 0 for none")
        for key in _NOT_NEGATIVE:
            if attrgetter(key)(self) < 0:
                raise ValueError(f"{key} is {attrgetter(key)(self)}; it must not be negative")
        if self.train.batch_size % self.train.accumulate:
            raise ValueError(
                f"train.batch_size {self.train.batch_size} is not divisible by train.accumulate {self.train.accumulate}"
            )
        if self.train.micro_batch_size and self.train.accumulate > 1:
            raise ValueError(
                f"train.micro_batch_size is {self.train.micro_batch_size} and train.accumulate "
                f"{self.train.accumulate}, which both say how many passes a step takes; set train.micro_batch_size=0 "
                f"or train.accumulate=1"
            )
        if self.train.precision in UNTRAINABLE:
            raise ValueError(
                f"train.precision is {self.train.precision!r}, which does not train: "
                f"{UNTRAINABLE[self.train.precision]}; give 'bf16-mixed' or '32-true'"
            )
        if self.train.precision not in PRECISIONS:
            raise ValueError(f"train.precision is {self.train.precision!r}; accepted: {', '.join(PRECISIONS)}")
        if self.train.threads < 0:
            raise ValueError(f"train.threads is {self.train.threads}; give 0 for PyTorch's own choice, or a count")
        check_loggers(self.train.loggers)
        self.train.parallel.validate()
        if self.train.float8:
            self._check_float8()
        pieces = 2 * self.train.parallel.context_parallel
        if pieces > 2 and self.data.length % pieces:
            raise ValueError(
                f"data.length is {self.data.length}; train.parallel.context_parallel {pieces // 2} cuts a row into "
                f"{pieces} equal pieces, so give a multiple of {pieces}"
            )
        return self

    def _check_float8(self) -> None:
        parallel = self.train.parallel
        if parallel.tensor_parallel > 1:
            raise ValueError(
                f"train.float8 with train.parallel.tensor_parallel={parallel.tensor_parallel}: the scale of a matrix "
                f"covers all of it, and no process has it whole; give tensor_parallel=1, or train.float8=false"
            )
        if self.train.precision == "64-true":
            raise ValueError(
                "train.float8 with train.precision='64-true': products in float8 are summed in fp32; give '32-true' "
                "or 'bf16-mixed', or train.float8=false"
            )
        multiple = FLOAT8_MULTIPLE * parallel.context_parallel
        if self.data.length % multiple:
            raise ValueError(
                f"data.length is {self.data.length}; a gradient in float8 is a product over tokens, whose number on "
                f"each process must be a multiple of {FLOAT8_MULTIPLE}: give a multiple of {multiple}, or "
                f"train.float8=false"
            )

    def _check_ranges(self) -> None:
        data, evaluation = self.data, self.evaluation
        for name, seed in (("train", self.train.seed), ("evaluation", evaluation.seed)):
            require_seed(f"{name}.seed", seed)
        if not all(0 <= beta < 1 for beta in self.optim.betas):
            raise ValueError(f"optim.betas is {self.optim.betas}; give two numbers from 0 up to, but not, 1")
        if not _shares(data.mixture):
            raise ValueError(
                f"data.mixture is {data.mixture}; give shares of 0 or more, at least one above 0, such as "
                f'{{"text": 1.0}}'
            )
        if not all(steps >= 1 and _shares(shares) for steps, shares in data.phases):
            raise ValueError(
                f"data.phases is {data.phases}; give each phase at least 1 step and shares of 0 or more, at least one "
                f'above 0, such as [[600, {{"copies": 1.0}}]]'
            )
        if (steps := sum(steps for steps, _ in data.phases)) > self.train.steps:
            raise ValueError(
                f"data.phases is {data.phases}, {steps} steps in all, and train.steps is {self.train.steps}; give "
                "fewer, or more train.steps"
            )
        if any(not weight > 0 for weight in data.corpora.values()):
            raise ValueError(f"data.corpora is {data.corpora}; give weights above 0, and leave out what is not wanted")
        for name in ("counts", "queries"):
            counts = getattr(data.needles, name)
            if not counts or min(counts) < 1:
                raise ValueError(f"data.needles.{name} is {counts}; give one or more numbers from 1, such as [1, 2]")
        if min(data.shots.classes, default=0) < 1:
            raise ValueError(
                f"data.shots.classes is {data.shots.classes}; give one or more numbers from 1, such as [2, 3]"
            )
        if any(not 1 <= asked <= count for count, asked in evaluation.needles):
            raise ValueError(
                f"evaluation.needles is {evaluation.needles}; give pairs [N, R] of needles and cities asked for, with "
                "R from 1 to N"
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


def override(config: RunConfig, assignments: list[str]) -> RunConfig:
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
