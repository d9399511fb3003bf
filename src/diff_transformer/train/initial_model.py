"""The model that a run starts with: drawn from ``train.seed``, or the saved model of ``train.initial_model``."""

import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diff_transformer.train.config import RunConfig, checked_model

_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def check_model(config: RunConfig) -> None:
    """Check that the model of a run and its matched Transformer can be made; allocates no weights.

    Raises:
        ValueError: for fields that do not exist, have the wrong type or do not fit together, or a model of another
            library in ``train.initial_model``.
        FileNotFoundError: if ``train.initial_model`` holds no model.
    """
    from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    checked_model(config.model)
    vocabulary_size(config)
    if config.train.initial_model is not None:
        model_folder(config)
        return
    settings = DiffTransformerConfig(**config.model)
    _check_length(settings, config)
    with torch.device("meta"):
        for each in (settings, matched_baseline(settings)):
            DiffTransformerForCausalLM(each)


def build_model(config: RunConfig, tokenizer):
    """The model of a run, on the CPU, in fp32.

    Every parameter that a DIFF Transformer (or another variant) shares by name and shape with its matched Transformer
    starts with the same values in both: these are drawn before all others, in the baseline's order. Only one of the two
    models is in memory at a time.

    Raises:
        ValueError: for rows longer than the model's positions, and as ``load_initial_model``.
    """
    from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    initial = None if config.train.initial_model is None else load_initial_model(config, tokenizer)
    special = {name: getattr(tokenizer, name) for name in _SPECIAL_TOKENS}
    settings = DiffTransformerConfig(**{**special, **config.model}) if initial is None else initial.config
    _check_length(settings, config)
    if initial is not None:
        return initial
    torch.manual_seed(config.train.seed)
    if settings.attention == "softmax":  # the weights of its head norm, if it has one, are constants
        return DiffTransformerForCausalLM(settings)
    shared = InitialValues(lambda: DiffTransformerForCausalLM(matched_baseline(settings)))
    model = DiffTransformerForCausalLM(settings)
    shared.copy_to(model)
    return model


def load_initial_model(config: RunConfig, tokenizer):
    """The model in the folder ``config.train.initial_model``, in fp32.

    The folder is that of a model of this package, or of a finished run (its ``model`` is loaded). Fields in
    ``config.model`` replace those of the saved configuration if the weights stay the same: ``rope_parameters``,
    ``max_position_embeddings``, ``backend`` and the like.

    Raises:
        FileNotFoundError: if there is no model in the folder.
        ValueError: if the model is another library's, was trained with another tokenizer, or does not have the weights
            that ``config.model`` asks for.
    """
    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.loading import misfits, read_model
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    folder = model_folder(config)
    _check_tokenizer(folder, tokenizer)
    saved = DiffTransformerConfig.from_pretrained(folder)
    fields = {name: getattr(saved, name) for name in DiffTransformerConfig.__annotations__ if hasattr(saved, name)}
    special = {name: getattr(tokenizer, name) for name in _SPECIAL_TOKENS}
    settings = DiffTransformerConfig(**{**fields, **special, **config.model})
    model, found = read_model(
        folder, DiffTransformerForCausalLM, config=settings, dtype=torch.float32, output_loading_info=True
    )
    wrong = misfits(found)
    if wrong:
        raise ValueError(
            f"config.model (attention={settings.attention!r}) does not fit the weights in {folder}: {wrong}. Leave "
            "out the fields that differ, or make the other model first (diff-transformer convert)"
        )
    return model


def vocabulary_size(config: RunConfig) -> int:
    """``model.vocab_size``, or that of ``train.initial_model`` if it is not given.

    Raises:
        ValueError: if neither is given, or the model is another library's.
        FileNotFoundError: if there is no model in the folder.
    """
    if "vocab_size" in config.model:
        return config.model["vocab_size"]
    if config.train.initial_model is None:
        raise ValueError("nothing says what the model is; give train.initial_model, a folder, or model.vocab_size")
    from diff_transformer.model.config import DiffTransformerConfig

    return DiffTransformerConfig.from_pretrained(model_folder(config)).vocab_size


def model_folder(config: RunConfig) -> Path:
    """The folder of the model of ``train.initial_model``, which may be the folder of a finished run.

    Raises:
        FileNotFoundError: if there is none. ValueError: if it is another library's.
    """
    folder = Path(str(config.train.initial_model)).expanduser()
    inner = folder / "model"
    if (inner / "config.json").exists():
        folder = inner
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"train.initial_model is {folder}, which holds no model (no config.json); give the folder of a saved model "
            "or of a finished run"
        )
    _refuse_other_libraries(folder)
    return folder


class InitialValues:
    """The initial values of the parameters of ``make_model()``, without the model.

    A random parameter is kept as the state of the random generator before its draw, and drawn again by ``copy_to``.
    Other parameters (the weights of norms, for example) are kept as tensors. On the CPU only.
    """

    def __init__(self, make_model):
        with _RecordedDraws() as recorded:
            model: nn.Module = make_model()
        self._values: dict[str, tuple[torch.Size, Tensor | tuple[Any, ...]]] = {}
        for name, parameter in model.named_parameters():
            draw = recorded.last.get(parameter.data_ptr())
            self._values[name] = parameter.shape, parameter.detach().clone() if draw is None else draw

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Give each parameter of ``model`` with a known name and shape its initial value, bit by bit.

        The state of the random generator is unchanged.
        """
        before = torch.get_rng_state()
        for name, parameter in model.named_parameters():
            if name not in self._values or self._values[name][0] != parameter.shape:
                continue
            value = self._values[name][1]
            if isinstance(value, Tensor):
                parameter.copy_(value)
            else:
                state, draw, args, kwargs = value
                torch.set_rng_state(state)
                draw(parameter, *args, **kwargs)
        torch.set_rng_state(before)


class _RecordedDraws(TorchDispatchMode):
    """Records the last random draw into each memory: the generator's state before it, the operation, its arguments.

    A record is dropped when its memory is written to in another way, or given to another tensor.
    """

    _RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)

    def __init__(self):
        super().__init__()
        self.last: dict[int, tuple[Tensor, Any, tuple, dict]] = {}

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        drawn = func in self._RANDOM
        if drawn:
            self.last[args[0].data_ptr()] = torch.get_rng_state(), func, args[1:], kwargs or {}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not drawn and not func.is_view:
            self.last.pop(result.data_ptr(), None)
        return result


def _check_length(settings, config: RunConfig) -> None:
    if settings.max_position_embeddings < config.data.length:
        raise ValueError(
            f"data.length is {config.data.length}, more than model.max_position_embeddings "
            f"{settings.max_position_embeddings}; raise the latter"
        )


def _refuse_other_libraries(folder: Path) -> None:
    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.convert.checkpoint import read_settings
    from diff_transformer.model.convert.layouts import LAYOUTS

    kind, ours = (read_settings(folder) or {}).get("model_type"), DiffTransformerConfig.model_type
    if kind in (None, ours):
        return
    convertible = {name for layout in LAYOUTS.values() for name in layout.model_types} - {ours}
    if kind in convertible:
        remedy = (
            f"convert it with `diff-transformer convert {shlex.quote(str(folder))} --out NEW` and set "
            "train.initial_model=NEW"
        )
    else:
        remedy = f"give one of it, or of a kind that diff-transformer convert reads: {', '.join(sorted(convertible))}"
    raise ValueError(f"train.initial_model is {folder}, a {kind!r} model and not one of this package; {remedy}")


def _check_tokenizer(folder: Path, tokenizer) -> None:
    from diff_transformer.data.tokenizer import load_tokenizer

    if (folder / "tokenizer.json").exists() and load_tokenizer(str(folder)).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"the model in {folder} was trained with another tokenizer; set data.tokenizer={folder}")
