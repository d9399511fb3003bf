"""The full configuration of a run, dotted overrides, and its JSON form (saved with every run)."""

import dataclasses
import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diff_transformer.checks import require_positive
from diff_transformer.durable import write_whole
from diff_transformer.train.values import as_kind


@dataclass
class NeedleConfig:
    """Multi-needle documents in training. ``counts``: needles in a document, drawn evenly; ``questions``: most
    questions a document may end with; ``digits``: of a magic number."""

    counts: tuple[int, ...] = (1, 2, 4)
    queries: tuple[int, ...] = (1, 2)
    questions: int = 4
    digits: int = 2


@dataclass
class RecallConfig:
    """Key-value recall in noise: ``pairs`` in a row; ``symbols``: keys, and as many values, to draw from."""

    pairs: int = 8
    symbols: int = 64


@dataclass
class DataConfig:
    """``corpus``: "python", a file, a folder or an archive, or a folder that ``diff-transformer prepare`` made.
    ``corpora``: several such folders, each with its weight, instead of it. ``tokenizer``: "bpe" (trained on the corpus;
    a prepared folder brings its own), "bytes", "cl100k", or a folder or hub name. ``upsample_length``: from so many
    tokens on a document of a prepared folder is long, its rows begin with it, and an epoch holds them
    ``upsample_factor`` times (sec. 3.3); 0 for never. ``length``: tokens a row. ``mixture``: shares of the rows of a
    batch, by source. ``loss``: "tokens" is the mean over all labelled tokens; "sources" is the mean over each source's
    tokens, weighted by the source's share, so that the few answers of a retrieval task are not drowned by prose. Needle
    documents are then scored on their answers alone. ``documents``: "joined" lets a token attend to whatever comes
    before it in its row; "separate" only to its own document (packed attention, positions from 0 in each)."""

    corpus: str = "python"
    corpora: dict[str, float] = field(default_factory=dict)
    max_bytes: int | None = None
    tokenizer: str = "bpe"
    length: int = 128
    upsample_length: int = 0
    upsample_factor: int = 4
    mixture: dict[str, float] = field(default_factory=lambda: {"text": 1.0})
    loss: str = "tokens"
    documents: str = "joined"
    needles: NeedleConfig = field(default_factory=NeedleConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    seed: int = 0


@dataclass
class OptimConfig:
    """AdamW with decay on matrices only; linear warm-up, then linear decay to ``final_lr_ratio * lr``."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 50
    final_lr_ratio: float = 0.04
    grad_clip: float = 1.0


STRATEGIES = ("auto", "single", "ddp", "fsdp")


@dataclass
class ParallelConfig:
    """How a run is spread over processes, one a device; losses change by rounding alone, so a run may go on in another
    way. ``strategy``: "auto" ("single" for one process, else "ddp", or "fsdp" with tensor parallel), "single", "ddp",
    "fsdp" (FSDP2). ``tensor_parallel``: processes that share each layer by heads; the others share the rows of a batch.
    ``devices``, ``num_nodes``: processes on a machine, machines; 0 for what the launcher (torchrun) starts, or one.
    ``sharded_checkpoints``: with "fsdp", each process writes its part of a checkpoint instead of sending it to rank 0.
    ``stall_seconds``: if no process moves for so long, the run ends and names the one that holds up the others; 0 for
    never."""

    strategy: str = "auto"
    tensor_parallel: int = 1
    devices: int = 0
    num_nodes: int = 0
    sharded_checkpoints: bool = False
    stall_seconds: float = 600.0

    def validate(self) -> None:
        """Raise ValueError for values that are not accepted; what depends on the processes is checked with them."""
        require_positive(**{"train.parallel.tensor_parallel": self.tensor_parallel})
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"train.parallel.strategy is {self.strategy!r}; accepted: {', '.join(map(repr, STRATEGIES))}"
            )
        for name in ("devices", "num_nodes", "stall_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.parallel.{name} is {getattr(self, name)}; it must not be negative")
        if self.sharded_checkpoints and self.strategy in ("single", "ddp"):
            raise ValueError(
                f"train.parallel.sharded_checkpoints needs strategy 'fsdp', not {self.strategy!r}, under which every "
                f"process has the whole model"
            )


@dataclass
class TrainConfig:
    """``initial_model``: folder of a saved model, or of a finished run, whose weights a run starts from (see
    ``train/initial.py``); None draws them. ``precision``: "32-true", "bf16-mixed" (weights and optimizer in fp32) or
    "64-true". ``threads``: CPU threads, 0 for PyTorch's own choice; fixed in a run because the sum of a reduction
    depends on it. ``batch_size``: rows of a step, over all processes and passes. ``micro_rows``: most rows that a
    process takes in one pass forward and backward, by which a step's memory grows; 0 for its whole share of the batch.
    ``accumulate``: instead of it, the number of passes. ``loss_chunk``: tokens whose logits are held at a time, 0 for
    all. ``prefetch``: batches prepared ahead, in a thread. ``peak_flops``: of a device, for MFU; 0 for what is known of
    it. ``checkpoint_keep``: how many of the last checkpoints stay; ``checkpoint_best``: the one with the lowest
    validation loss stays too; ``checkpoint_async``: a thread writes a copy of the state while training goes on."""

    initial_model: str | None = None
    steps: int = 1000
    batch_size: int = 16
    micro_rows: int = 0
    accumulate: int = 1
    precision: str = "32-true"
    seed: int = 0
    log_every: int = 10
    validate_every: int = 200
    validation_rows: int = 64
    checkpoint_every: int = 200
    checkpoint_keep: int = 2
    checkpoint_best: bool = True
    checkpoint_async: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    threads: int = 0
    loss_chunk: int = 0
    prefetch: int = 2
    peak_flops: float = 0.0
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def rows_of_a_pass(self, processes: int = 1) -> int:
        """Most rows in a pass forward and backward of each of ``processes`` that share the rows of a batch."""
        share = self.batch_size // processes
        passes = -(-share // self.micro_rows) if self.micro_rows else self.accumulate
        return -(-share // passes)


@dataclass
class EvaluationConfig:
    """What ``compare`` measures. ``needles``: cells (N, R) of Table 2; ``samples``: prompts a cell and depth;
    ``allocation_needles``, ``allocation_samples``: the same for Table 3; ``loss_rows``: held-out rows for the loss and
    its slices; ``ngram``, ``frequent_share``: an n-gram that makes up more of the training text is no AR-Hit;
    ``outlier_rows``: held-out rows for Table 5; ``throughput_repeats``: timed repeats of each side. ``more``: further
    experiments by name, each with the settings in which it differs from ``diff-transformer eval NAME --quick`` (corpus,
    length and seed are those of the run)."""

    needles: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (4, 1), (4, 2))
    samples: int = 40
    allocation_needles: int = 1
    allocation_samples: int = 20
    loss_rows: int = 256
    ngram: int = 2
    frequent_share: float = 6e-5
    outlier_rows: int = 64
    throughput_repeats: int = 7
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: int = 0


PRECISIONS = ("32-true", "bf16-mixed", "64-true")
_ROUNDED = "its weights are in 16 bits, which round away updates as small as optim.lr (nothing keeps them in fp32)"
UNTRAINABLE = {  # other names of Fabric's -> why no run takes them
    "bf16-true": _ROUNDED,
    "16-true": _ROUNDED,
    "16-mixed": "it scales the loss, with which gradients cannot be clipped here, and no checkpoint holds the scale",
}
MAX_SEED = 2**32 - 1
_COUNTS = ("samples", "allocation_samples", "allocation_needles", "loss_rows", "outlier_rows", "throughput_repeats")


@dataclass
class RunConfig:
    """Everything that determines a run. ``model`` holds fields of ``DiffTransformerConfig``."""

    name: str
    model: dict[str, Any]
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def validate(self) -> "RunConfig":
        """Raise ValueError for sizes that are not positive and values that contradict one another."""
        positive = {
            "data.length": self.data.length,
            "data.upsample_factor": self.data.upsample_factor,
            "data.max_bytes": self.data.max_bytes,
            "train.steps": self.train.steps,
            "train.batch_size": self.train.batch_size,
            "train.accumulate": self.train.accumulate,
            "train.log_every": self.train.log_every,
            "train.validate_every": self.train.validate_every,
            "train.validation_rows": self.train.validation_rows,
            "train.checkpoint_every": self.train.checkpoint_every,
            "train.checkpoint_keep": self.train.checkpoint_keep,
            "data.needles.digits": self.data.needles.digits,
            "data.needles.questions": self.data.needles.questions,
            "data.recall.pairs": self.data.recall.pairs,
            "data.recall.symbols": self.data.recall.symbols,
            "optim.lr": self.optim.lr,
            "evaluation.ngram": self.evaluation.ngram,
            **{f"evaluation.{name}": getattr(self.evaluation, name) for name in _COUNTS},
        }
        require_positive(**positive)
        self._check_ranges()
        if self.data.loss not in ("tokens", "sources"):
            raise ValueError(f"data.loss is {self.data.loss!r}; accepted: 'tokens', 'sources'")
        if self.data.upsample_length < 0:
            raise ValueError(f"data.upsample_length is {self.data.upsample_length}; give tokens, or 0 for none")
        if self.data.documents not in ("joined", "separate"):
            raise ValueError(f"data.documents is {self.data.documents!r}; accepted: 'joined', 'separate'")
        for name in ("eps", "weight_decay", "warmup_steps", "grad_clip", "final_lr_ratio"):
            if getattr(self.optim, name) < 0:
                raise ValueError(f"optim.{name} is {getattr(self.optim, name)}; it must not be negative")
        if self.train.batch_size % self.train.accumulate:
            raise ValueError(
                f"train.batch_size {self.train.batch_size} is not divisible by train.accumulate {self.train.accumulate}"
            )
        if self.train.micro_rows and self.train.accumulate > 1:
            raise ValueError(
                f"train.micro_rows is {self.train.micro_rows} and train.accumulate {self.train.accumulate}, which "
                f"both say how many passes a step takes; set train.micro_rows=0 or train.accumulate=1"
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
        for name in ("micro_rows", "loss_chunk", "prefetch", "peak_flops"):
            if getattr(self.train, name) < 0:
                raise ValueError(f"train.{name} is {getattr(self.train, name)}; it must not be negative")
        self.train.parallel.validate()
        return self

    def _check_ranges(self) -> None:
        data, evaluation = self.data, self.evaluation
        for name, seed in (("data", data.seed), ("train", self.train.seed), ("evaluation", evaluation.seed)):
            if not 0 <= seed <= MAX_SEED:
                raise ValueError(f"{name}.seed is {seed}; give a whole number from 0 to {MAX_SEED}")
        if not all(0 <= beta < 1 for beta in self.optim.betas):
            raise ValueError(f"optim.betas is {self.optim.betas}; give two numbers from 0 up to, but not, 1")
        if any(share < 0 for share in data.mixture.values()) or not any(data.mixture.values()):
            raise ValueError(
                f"data.mixture is {data.mixture}; give shares of 0 or more, at least one above 0, such as "
                f'{{"text": 1.0}}'
            )
        if any(not weight > 0 for weight in data.corpora.values()):
            raise ValueError(f"data.corpora is {data.corpora}; give weights above 0, and leave out what is not wanted")
        for name in ("counts", "queries"):
            counts = getattr(data.needles, name)
            if not counts or min(counts) < 1:
                raise ValueError(f"data.needles.{name} is {counts}; give one or more numbers from 1, such as [1, 2]")
        if any(not 1 <= asked <= count for count, asked in evaluation.needles):
            raise ValueError(
                f"evaluation.needles is {evaluation.needles}; give pairs [N, R] of needles and cities asked for, with "
                "R from 1 to N"
            )

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def save(self, path: Path):
        """Write the configuration as JSON, whole or not at all."""
        write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        return _build(cls, values, "")

    @classmethod
    def load(cls, path: Path) -> "RunConfig":
        """What ``save`` wrote.

        Settings that the file does not have, of an earlier version, are at their defaults.

        Raises:
            ValueError: for a setting that does not exist, naming the nearest.
        """
        return cls.from_dict(json.loads(path.read_text()))


def override(config: RunConfig, assignments: list[str]) -> RunConfig:
    """A copy of ``config`` with ``["optim.lr=1e-3", "data.mixture.text=0.5", ...]`` applied; values are JSON or text.

    Raises:
        ValueError: for an assignment without ``=``, a key that does not exist (naming the nearest that does), or a
            value of another type than the key's.
    """
    values = config.to_dict()
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        if not separator:
            raise ValueError(f"{assignment!r} is not an assignment; write key=value, for example optim.lr=1e-3")
        *parents, key = path.strip().split(".")
        place = values
        for depth, parent in enumerate(parents):
            if not isinstance(place.get(parent), dict):
                raise ValueError(unknown_key(path, values, depth))
            place = place[parent]
        open_ended = parents in (["model"], ["data", "mixture"]) or parents[:2] == ["evaluation", "more"]
        if key not in place and not open_ended:
            raise ValueError(unknown_key(path, values, len(parents)))
        if parents == ["model"] and key not in place:
            _check_model_field(key)
        place[key] = _parse(text.strip())
    config = RunConfig.from_dict(values)
    if any(assignment.strip().startswith("model") for assignment in assignments):
        config.model = checked_model(config.model)
    return config


def unknown_key(path: str, values: dict, depth: int = 0) -> str:
    """The message for a key that does not exist, with the nearest ones that do."""
    near = difflib.get_close_matches(path, list(_dotted(values)), n=3, cutoff=0.4)
    hint = f"; the nearest: {', '.join(near)}" if near else ""
    return f"no setting {path!r}{hint}"


def _dotted(values: dict, prefix: str = ""):
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _check_model_field(key: str):
    from diff_transformer.model.config import DiffTransformerConfig

    fields = sorted(DiffTransformerConfig.__dataclass_fields__)
    if key not in fields:
        near = difflib.get_close_matches(key, fields, n=3, cutoff=0.4)
        raise ValueError(f"no setting 'model.{key}'; the nearest: {', '.join('model.' + n for n in near) or 'none'}")


def checked_model(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of ``DiffTransformerConfig``, of the kinds that it declares; ValueError for a value of another kind."""
    from diff_transformer.model.config import DiffTransformerConfig

    kinds = {name: field.type for name, field in DiffTransformerConfig.__dataclass_fields__.items()}
    return {key: as_kind(kinds.get(key, Any), value, f"model.{key}") for key, value in fields.items()}


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _build(kind, values: dict[str, Any], prefix: str):
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, list(fields), n=1)
            raise ValueError(f"no setting {prefix + key!r}" + (f"; the nearest: {prefix}{near[0]}" if near else ""))
    made = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(fields[key].type) and isinstance(value, dict):
            made[key] = _build(fields[key].type, value, f"{prefix}{key}.")
        else:
            made[key] = as_kind(fields[key].type, value, prefix + key)
    return kind(**made)
