"""From a configuration to the plan of a run: every check, once, before anything is loaded or written."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diff_transformer.checks import first_line, listed, require_extra
from diff_transformer.errors import UserError
from diff_transformer.train.config import RunConfig, checked_model

# which the loss here does not apply
_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True)
class Plan:
    """A run that can be carried out."""

    config: RunConfig
    world: int  # processes
    strategy: str  # "single", "ddp" or "fsdp"
    model: Any  # configuration of the model, of this package or of another library
    source: Path | None  # folder of its weights; None for random ones


def world_size() -> int:
    """Processes of this run: those that torchrun started, or this one alone."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def resolve(config: RunConfig, world: int = 1) -> Plan:
    """The plan to train ``config`` with ``world`` processes. Reads the configuration of ``train.initial_model``.

    Raises:
        UserError: for settings that are out of range, contradict each other, or do not fit the model or the processes.
    """
    import torch

    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.loading import folder_of
    from diff_transformer.model.modeling import RotaryEmbedding
    from diff_transformer.model.parts import ENTRY

    config = RunConfig.from_dict(config.to_dict())
    strategy = _strategy(config, world)
    source = None if config.train.initial_model is None else folder_of(config.train.initial_model)
    vocabulary_size(config)
    if config.train.weights == "lora":
        require_extra("inference", "train.weights=lora", "peft")
        if source is None:
            raise UserError("train.weights is 'lora', adapters of a trained model; give it as train.initial_model")
    if source is None:
        model: Any = DiffTransformerConfig(**config.model)
    else:
        model = _saved_model(config, source)
    if config.train.weights == "dex" and (getattr(model, ENTRY, None) or {}).get("kind") != "dex":
        raise UserError("train.weights is 'dex', and the model has no DEX to train; `convert --to dex` adds it")
    positions = getattr(model, "max_position_embeddings", config.data.length)
    if positions < config.data.length:
        raise UserError(
            f"data.length is {config.data.length}, more than model.max_position_embeddings {positions}; raise "
            "the latter"
        )
    if isinstance(model, DiffTransformerConfig):
        try:
            with torch.device("meta"):
                RotaryEmbedding(model)
        except KeyError as error:  # of transformers
            raise UserError(
                f"model.rope_parameters is {model.rope_parameters}; it lacks {error}, or transformers has no such kind"
            ) from None
        check_split(model, config.train.parallel.tensor_parallel)
        _check_context(config, model)
    return Plan(config, world, strategy, model, source)


def _strategy(config: RunConfig, world: int) -> str:
    parallel, train = config.train.parallel, config.train
    ways, group = parallel.tensor_parallel, parallel.tensor_parallel * parallel.context_parallel
    if world % group:
        raise UserError(
            f"train.parallel.tensor_parallel is {ways} and context_parallel {parallel.context_parallel}: groups of "
            f"{group}, which do not divide the {world} processes; start {group * -(-world // group)}, or "
            "give other sizes"
        )
    if world // ways % parallel.replicas:
        raise UserError(
            f"train.parallel.replicas is {parallel.replicas}, which does not divide {world // ways}, the processes "
            "beside tensor parallel; give a number that does"
        )
    if train.batch_size % (world // group):
        raise UserError(
            f"train.batch_size is {train.batch_size}, which {world // group} processes with rows of their own do not "
            "divide; give a multiple"
        )
    sharded = parallel.strategy == "fsdp" or ways > 1 or parallel.replicas > 1
    if sharded and parallel.strategy == "ddp":
        raise UserError(
            f"train.parallel.strategy is 'ddp', under which every process has a copy of the model: tensor_parallel "
            f"{ways} and replicas {parallel.replicas} need strategy 'fsdp'"
        )
    if sharded and config.train.weights == "lora":
        raise UserError("train.weights is 'lora', whose adapters are not sharded; leave sharding out")
    if sharded:
        return "fsdp"
    return "single" if world == 1 else "ddp"


def check_split(config: Any, ways: int) -> None:
    """Raise UserError unless tensor parallel can give each of ``ways`` processes whole heads of a model's layers."""
    if ways == 1:
        return
    heads = config.heads
    counts = {"output heads": heads.outputs, "value heads": heads.values, "key heads": heads.keys}
    if config.attention == "grouped_diff":
        counts["noise heads"] = heads.queries // (config.signal_heads_per_noise_head + 1)
    counts |= {"channels of intermediate_size": config.intermediate_size, "words of vocab_size": config.vocab_size}
    wrong = [f"{count} {name}" for name, count in counts.items() if count % ways]
    if wrong:
        raise UserError(
            f"train.parallel.tensor_parallel is {ways}, which does not divide {', '.join(wrong)} of this model; a head "
            "stays whole, with both its maps; give a tensor_parallel that divides them"
        )
    if getattr(config, "hidden_act", "silu") == "poly_norm":
        raise UserError(
            f"hidden_act='poly_norm' takes a norm over the whole feed-forward width, which tensor_parallel={ways} "
            "splits; give tensor_parallel=1"
        )


def _check_context(config: RunConfig, model: Any) -> None:
    """Raise UserError unless ``train.parallel.context_parallel`` processes can share a row."""
    size = config.train.parallel.context_parallel
    if size > 1 and config.data.length % (2 * size):
        raise UserError(
            f"data.length is {config.data.length}; train.parallel.context_parallel {size} cuts a row into {2 * size} "
            f"equal pieces, so give a multiple of {2 * size}"
        )
    if size > 1 and model.attention == "dint":
        raise UserError(
            f"train.parallel.context_parallel is {size}, but attention='dint' takes a running mean over the whole row, "
            "which no process has; give context_parallel=1, or another attention"
        )


def check_backend(config: Any, device: Any, precision: str) -> None:
    """Raise UserError for a named backend that does not compute the maps of a model with this configuration here."""
    import torch

    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.ops.backends import resolve as resolve_backend
    from diff_transformer.ops.call import Call

    if isinstance(config, DiffTransformerConfig) and config.variant.maps == 2 and config.backend != "auto":
        dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
        q, v = (torch.empty(1, 1, 1, n, dtype=dtype, device=device) for n in (config.head_dim, config.heads.value_dim))
        resolve_backend(Call(q, q, q, None, v, q.new_zeros(1, 1, 1, 1), is_causal=True, backend=config.backend))


def vocabulary_size(config: RunConfig) -> int:
    """``model.vocab_size``, or that of ``train.initial_model`` if it is not given; UserError if neither is."""
    if "vocab_size" in config.model:
        return config.model["vocab_size"]
    if config.train.initial_model is None:
        raise UserError("the configuration sets no model; give train.initial_model, a folder, or model.vocab_size")
    from diff_transformer.model.loading import folder_of

    return saved_settings(folder_of(config.train.initial_model)).vocab_size


def _saved_model(config: RunConfig, folder: Path) -> Any:
    """The configuration of the model in ``folder``, with the fields of ``config.model`` if it is of this package."""
    from diff_transformer.model.config import DiffTransformerConfig

    saved = saved_settings(folder)
    if isinstance(saved, DiffTransformerConfig):
        fields = {name: getattr(saved, name) for name in DiffTransformerConfig.__annotations__ if hasattr(saved, name)}
        return DiffTransformerConfig(**fields | checked_model(config.model))
    from diff_transformer.model.convert.from_softmax import nearest

    counted = nearest(saved).to_dict()
    if wrong := [name for name, value in config.model.items() if counted[name] != value]:
        raise UserError(
            f"config.model has {', '.join(wrong)}, and the {saved.model_type!r} model in {folder} keeps its own "
            "configuration; leave them out, or with them the recipe (`--recipe uptrain` sets no model)"
        )
    _check_class(config, folder)
    return saved


def saved_settings(folder: Path) -> Any:
    """The configuration of the model in ``folder``, of this package or another library."""
    from transformers import AutoConfig

    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.loading import UNREADABLE, read_settings

    if read_settings(folder).get("model_type") == DiffTransformerConfig.model_type:
        return DiffTransformerConfig.from_pretrained(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except UNREADABLE as error:
        raise UserError(
            f"train.initial_model is {folder}, whose config.json transformers cannot read ({first_line(error)})"
        ) from None


def _check_class(config: RunConfig, folder: Path) -> None:
    """Raise UserError for a model of another library that cannot be trained here, or not with these settings."""
    from diff_transformer.model.convert.folder import model_without_weights

    model: Any = model_without_weights(folder)
    check_trainable(folder, model)
    parallel = config.train.parallel
    refused = {
        "data.documents=separate": config.data.documents == "separate",
        "train.parallel.tensor_parallel": parallel.tensor_parallel > 1,
        "train.parallel.context_parallel": parallel.context_parallel > 1,
    }
    if wrong := [name for name, is_set in refused.items() if is_set]:
        raise UserError(
            f"{', '.join(wrong)}: {folder} keeps the class {type(model).__name__}, which does not support it here; "
            "leave it out"
        )


def check_trainable(folder: Path, model: Any) -> None:
    """Raise UserError for a model of another library that this loop cannot train."""
    from diff_transformer.model.parts import read

    reason = None
    try:
        if not hasattr(model.config, "differential"):
            read(model)
    except UserError as error:
        reason = str(error)
    more = [name for name in _AFTER_THE_HEAD if getattr(model.config, name, None) not in (None, 1)]
    more += ["a bias"] if getattr(model.get_output_embeddings(), "bias", None) is not None else []
    if more and not reason:
        reason = f"its logits are more than a product with the output matrix ({listed(more)})"
    if reason:
        raise UserError(f"{folder} cannot be trained: {reason}")
