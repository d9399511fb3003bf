"""The model that a run starts with: drawn from ``train.seed``, or the saved model of ``train.initial_model``."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diff_transformer.checks import first_line, listed
from diff_transformer.data.tokenizer import special_tokens_of
from diff_transformer.errors import UserError
from diff_transformer.train.config import RunConfig, checked_model
from diff_transformer.train.weights import check_weights

# which the loss here does not apply
_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def check_model(config: RunConfig) -> None:
    """Check that the model of a run and its matched Transformer can be made; allocates no weights.

    Raises:
        RuntimeError: as ``check_float8`` and ``check_weights``.
        ValueError: for fields that do not exist, have the wrong type or do not fit together, or a model in
            ``train.initial_model`` that is to be converted first or cannot be trained.
        FileNotFoundError: if ``train.initial_model`` holds no model.
    """
    from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    checked_model(config.model)
    check_weights(config.train)
    vocabulary_size(config)
    if config.train.initial_model is not None:
        folder = model_folder(config)
        model = _on_meta(folder)
        if not isinstance(model, DiffTransformerForCausalLM):
            _check_plain(config, folder, model)
    else:
        settings = DiffTransformerConfig(**config.model)
        _check_length(settings, config)
        with torch.device("meta"):
            model, _ = [DiffTransformerForCausalLM(each) for each in (settings, matched_baseline(settings))]


def check_backend_on(config: RunConfig, device: torch.device) -> None:
    """Raise RuntimeError if ``model.backend`` names a backend that does not work on the device of a run."""
    from diff_transformer.ops import available_backends

    name = config.model.get("backend", "auto")
    if name == "auto" or config.model.get("attention") == "softmax":
        return
    dtype = {"bf16-mixed": torch.bfloat16, "64-true": torch.float64}.get(config.train.precision, torch.float32)
    usable = available_backends(device, dtype)
    if name not in usable:
        raise UserError(f"model.backend is {name!r}, which does not run on {device.type}; give {', '.join(usable)}")


class InitialValues:
    """The initial values that the constructor of a model gives its parameters, without memory for them.

    Attributes:
        model: ``make_model()``, with its parameters on the meta device. Buffers are real.
        shapes: of the parameters by name.
    """

    def __init__(self, make_model: Callable[[], nn.Module]):
        with _Recorded() as recorded:
            self.model = make_model()
        parameters = dict(self.model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._draws = recorded.draws
        self._kept = {name: parameter.detach() for name, parameter in parameters.items() if not parameter.is_meta}
        self._written = {
            name: recorded.written[_memory(parameter)] for name, parameter in parameters.items() if parameter.is_meta
        }

    def draw(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """The initial values of the parameters ``names``, bit by bit those that the constructor draws.

        The generator moves on by everything that the constructor draws.
        """
        wanted = {id(writes[0]): (name, writes) for name, writes in self._written.items() if name in names}
        for drawn in self._draws:
            tensor = drawn.again(torch.empty(drawn.shape, dtype=drawn.dtype))
            if id(drawn) in wanted:
                name, (_, *changes) = wanted.pop(id(drawn))
                yield name, _repeated(changes, tensor)
        for name, writes in wanted.values():  # constants
            yield name, _repeated(writes, torch.empty(writes[0].shape, dtype=writes[0].dtype))
        for name in names & self._kept.keys():
            yield name, self._kept[name]


@dataclass(frozen=True)
class _Written:
    """An operation that wrote to a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    operation: Any
    args: tuple
    kwargs: dict[str, Any]

    def again(self, tensor: Tensor) -> Tensor:
        return self.operation(tensor, *self.args, **self.kwargs)


def _repeated(operations: Sequence[_Written], tensor: Tensor) -> Tensor:
    for operation in operations:
        tensor = operation.again(tensor)
    return tensor


class _Recorded(TorchDispatchMode):
    """Makes empty tensors on the meta device and records what is written to each, from the last time it was whole."""

    _RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
    _WHOLE = (*_RANDOM, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)

    def __init__(self):
        super().__init__()
        self.draws: list[_Written] = []
        self.written: dict[int, list[_Written]] = {}

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            made = func(*args, **{**kwargs, "device": "meta"})
            self.written[_memory(made)] = []  # its memory may have been another tensor's
            return made
        tensor = args[0] if args else None
        if not (isinstance(tensor, Tensor) and tensor.is_meta and func._schema.is_mutable):
            return func(*args, **kwargs)
        write = _Written(tensor.shape, tensor.dtype, func, args[1:], kwargs)
        if func in self._RANDOM:
            self.draws.append(write)
        if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
            raise NotImplementedError(f"{func} writes to a part of a parameter, which cannot be drawn again")
        before = [] if func in self._WHOLE else self.written[_memory(tensor)]
        self.written[_memory(tensor)] = [*before, write]
        return tensor


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _assign(parameter: Tensor, value: Tensor) -> None:
    """Copy ``value``, which is whole, to this process's part of ``parameter``."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
        parameter = parameter.to_local()
    parameter.copy_(value)


@dataclass(frozen=True)
class Start:
    """A model without memory for its weights (on the meta device), and the values with which they start.

    Every parameter that a DIFF Transformer (or another variant) shares by name and shape with its matched Transformer
    starts with the same values in both: these are drawn before all others, in the baseline's order.
    """

    model: Any
    seed: int = 0
    draws: tuple[tuple[InitialValues, set[str]], ...] = ()  # values, and the names of parameters that get them

    def fill(self, root: nn.Module, device: torch.device | str = "cpu") -> None:
        """Give the parameters memory on ``device`` and their values, bit for bit those of one process.

        Args:
            root: the model, or a module around it, whose parameters may be sharded. Each process then draws one whole
                parameter at a time and keeps its part.
        """
        if not self.draws:  # the weights are there
            return
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        root.to_empty(device=device)
        if self.model.config.tie_word_embeddings:
            self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight
        torch.manual_seed(self.seed)
        with torch.no_grad():
            for empty, buffer in zip(self.model.buffers(), buffers, strict=True):
                empty.copy_(buffer)
            parameters = dict(self.model.named_parameters())
            for values, names in self.draws:
                for name, value in values.draw(names):
                    _assign(parameters[name], value)


def start_model(config: RunConfig, tokenizer) -> Start:
    """How the model of a run starts, in fp32; raises as ``build_model``."""
    from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    initial = None if config.train.initial_model is None else load_initial_model(config, tokenizer)
    special = special_tokens_of(tokenizer, vocabulary_size(config))
    settings = DiffTransformerConfig(**{**special, **config.model}) if initial is None else initial.config
    _check_length(settings, config)
    if initial is not None:
        return Start(initial)
    own = InitialValues(lambda: DiffTransformerForCausalLM(settings))
    if settings.attention == "softmax":  # the weights of its head norm, if it has one, are constants
        return Start(own.model, config.train.seed, ((own, set(own.shapes)),))
    baseline = InitialValues(lambda: DiffTransformerForCausalLM(matched_baseline(settings)))
    shared = {name for name, shape in own.shapes.items() if baseline.shapes.get(name) == shape}
    return Start(own.model, config.train.seed, ((baseline, shared), (own, set(own.shapes) - shared)))


def build_model(config: RunConfig, tokenizer):
    """The model of a run, on the CPU, in fp32, as ``Start`` says.

    Raises:
        ValueError: for rows longer than the model's positions, and as ``load_initial_model``.
    """
    start = start_model(config, tokenizer)
    start.fill(start.model)
    return start.model


def load_initial_model(config: RunConfig, tokenizer):
    """The model in the folder ``config.train.initial_model``, in fp32.

    The folder is that of a model, or of a finished run (its ``model`` is loaded). Fields in ``config.model`` replace
    those of the saved configuration if the weights stay the same: ``rope_parameters``, ``max_position_embeddings``,
    ``backend`` and the like. A model of another library keeps its class and its configuration.

    Raises:
        FileNotFoundError: if there is no model in the folder.
        ValueError: if the model is to be converted first, was trained with another tokenizer, or does not have the
            weights that ``config.model`` asks for.
    """
    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.convert.from_softmax import nearest
    from diff_transformer.model.loading import read_model
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    folder = model_folder(config)
    _check_tokenizer(folder, tokenizer)
    saved = _settings(folder)
    if not isinstance(saved, DiffTransformerConfig):
        counted = nearest(saved).to_dict()
        if wrong := [name for name, value in config.model.items() if counted[name] != value]:
            raise UserError(
                f"config.model has {', '.join(wrong)}, and the {saved.model_type!r} model in {folder} keeps its own "
                "configuration; leave them out"
            )
        return read_model(folder, dtype=torch.float32)
    fields = {name: getattr(saved, name) for name in DiffTransformerConfig.__annotations__ if hasattr(saved, name)}
    special = special_tokens_of(tokenizer, saved.vocab_size)
    settings = DiffTransformerConfig(**{**fields, **special, **config.model})
    return read_model(folder, DiffTransformerForCausalLM, config=settings, dtype=torch.float32)


def vocabulary_size(config: RunConfig) -> int:
    """``model.vocab_size``, or that of ``train.initial_model`` if it is not given.

    Raises:
        ValueError: if neither is given, or the model is to be converted first.
        FileNotFoundError: if there is no model in the folder.
    """
    if "vocab_size" in config.model:
        return config.model["vocab_size"]
    if config.train.initial_model is None:
        raise UserError("nothing says what the model is; give train.initial_model, a folder, or model.vocab_size")
    return _settings(model_folder(config)).vocab_size


def model_folder(config: RunConfig) -> Path:
    """The folder of the model of ``train.initial_model``, which may be the folder of a finished run.

    Raises:
        FileNotFoundError: if there is none. ValueError: if it is one to convert first.
    """
    folder = Path(str(config.train.initial_model)).expanduser()
    inner = folder / "model"
    if (inner / "config.json").exists():
        folder = inner
    if not (folder / "config.json").exists():
        raise UserError(
            f"train.initial_model is {folder}, which holds no model (no config.json); give the folder of a saved model "
            "or of a finished run"
        )
    _refuse_convertible(folder)
    return folder


def _check_length(settings, config: RunConfig) -> None:
    positions = getattr(settings, "max_position_embeddings", config.data.length)
    if positions < config.data.length:
        raise UserError(
            f"data.length is {config.data.length}, more than model.max_position_embeddings "
            f"{positions}; raise the latter"
        )


def _settings(folder: Path) -> Any:
    """The configuration of the model in ``folder``, of this package or another library."""
    from transformers import AutoConfig

    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.loading import read_settings

    if read_settings(folder).get("model_type") in (None, DiffTransformerConfig.model_type):
        return DiffTransformerConfig.from_pretrained(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise UserError(
            f"train.initial_model is {folder}, whose config.json transformers does not read ({first_line(error)})"
        ) from None


def _on_meta(folder: Path) -> nn.Module:
    """The model in ``folder`` without its weights.

    Raises:
        ValueError: for a model of another library that is no decoder which ``differentiate`` takes or has made.
    """
    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.convert.folder import model_without_weights
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    settings = _settings(folder)
    if isinstance(settings, DiffTransformerConfig):
        with torch.device("meta"):
            return DiffTransformerForCausalLM(settings)
    model = model_without_weights(folder)
    check_trainable(folder, model)
    return model


def check_trainable(folder: Path, model: Any) -> None:
    """Raise ValueError for a model of another library that this loop cannot train."""
    from diff_transformer.model.differentiate import read

    reason = None
    try:
        if not hasattr(model.config, "differential"):
            read(model)
    except ValueError as error:
        reason = str(error)
    more = [name for name in _AFTER_THE_HEAD if getattr(model.config, name, None) not in (None, 1)]
    more += ["a bias"] if getattr(model.get_output_embeddings(), "bias", None) is not None else []
    if more and not reason:
        reason = f"its logits are more than a product with the output matrix ({listed(more)})"
    if reason:
        raise UserError(f"{folder} is not trained here: {reason}")


def _check_plain(config: RunConfig, folder: Path, model: Any) -> None:
    """Raise ValueError for settings that need this package's class or the names of its parts."""
    train, parallel = config.train, config.train.parallel
    found = {
        "data.documents=separate": config.data.documents == "separate",
        "train.parallel.tensor_parallel": parallel.tensor_parallel > 1,
        "train.parallel.context_parallel": parallel.context_parallel > 1,
    }
    if not hasattr(model.base_model, "layers"):
        found |= {
            "train.compile": train.compile,
            "train.activation_checkpointing=selective": train.activation_checkpointing == "selective",
            "train.parallel.strategy=fsdp": parallel.strategy == "fsdp" or parallel.replicas > 1,
        }
    if wrong := [name for name, is_set in found.items() if is_set]:
        raise UserError(
            f"{', '.join(wrong)}: {folder} keeps the class {type(model).__name__}, which does not support it here; "
            "leave it out"
        )


def _refuse_convertible(folder: Path) -> None:
    """Raise UserError for a model of another library that this package's class can hold."""
    from diff_transformer.model.convert.folder import PACKAGE, layout_of, package_config

    layout, settings = layout_of(folder)
    if layout in (None, PACKAGE) or (layout == "llama" and package_config(folder) is None):
        return
    raise UserError(
        f"train.initial_model is {folder}, a {settings['model_type']!r} model and not one of this package; convert it "
        f"with `diff-transformer convert {shlex.quote(str(folder))} --out NEW` and set train.initial_model=NEW"
    )


def _check_tokenizer(folder: Path, tokenizer) -> None:
    from diff_transformer.data.tokenizer import load_tokenizer

    if (folder / "tokenizer.json").exists() and load_tokenizer(str(folder)).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"the model in {folder} was trained with another tokenizer; set data.tokenizer={folder}")
