"""Published checkpoints in another layout, served as they are: what ``convert`` would write, without writing it.

vLLM reads their configuration through ``PublishedConfig``, as ours, and the model makes its tensors from theirs while
they are loaded, by the plan of the conversion. Their remote code is not needed and does not run.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.layouts import LAYOUTS
from diff_transformer.model.convert.plan import Plan
from diff_transformer.serving.vllm.checks import CheckedWeights

ARCHITECTURES = {"diffllama": "DiffLlamaForCausalLM", "motif": "MotifForCausalLM"}  # by layout
MODEL_TYPES = {"diffllama": "diffllama", "motif": "motif", "Motif": "motif"}  # in config.json: layout


class PublishedConfig(PreTrainedConfig):
    """The class by which vLLM reads a configuration of ``MODEL_TYPES``; the result is a ``DiffTransformerConfig``."""

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """``package_config`` of a ``config.json``'s content; beside ``kwargs`` with ``return_unused_kwargs=True``."""
        wants_rest = kwargs.pop("return_unused_kwargs", False)
        config = package_config(config_dict, kwargs.pop("name_or_path", "config.json"))
        return (config, kwargs) if wants_rest else config


def package_config(settings: dict[str, Any], name: str) -> DiffTransformerConfig:
    """The configuration in this package's layout; its attribute ``published`` keeps ``settings``.

    Args:
        settings: content of a ``config.json`` whose ``model_type`` is one of ``MODEL_TYPES``.
        name: of the model, for messages.

    Raises:
        ValueError: for quantised weights, and for what this package's model does not have.
    """
    if quantization := settings.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise UserError(
            f"{name} has quantised weights ({method}), whose rows cannot be moved to this package's layout; serve the "
            "checkpoint that was quantised, with vLLM's --quantization if it must be smaller"
        )
    layout = MODEL_TYPES[settings["model_type"]]
    module = LAYOUTS[layout].load()
    config = module.to_package(module.parse(settings, name)).config
    config.architectures = [ARCHITECTURES[layout]]
    config.dtype = getattr(torch, settings.get("dtype") or settings.get("torch_dtype") or "float32")
    config.published = settings
    return config


def checked(
    config: DiffTransformerConfig, weights: Iterable[tuple[str, Tensor]], *, whole: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Our tensors, made of a published checkpoint's as they arrive; not ``whole``: some may be missing.

    Raises:
        ValueError: for tensors that are missing, unknown or of another shape, by the names that they have there.
    """
    module = LAYOUTS[MODEL_TYPES[config.published["model_type"]]].load()
    theirs = module.parse(config.published, "config.json")
    names = CheckedWeights(module.tensors(theirs), tied=config.tie_word_embeddings)
    yield from converted(module.to_package(theirs).plan, names.check(weights))
    if whole:
        names.require_all()


def converted(plan: Plan, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The targets of a plan, each as soon as its sources have come; a source is kept until its last target is made.

    Tensors that the plan does not name, such as the head beside tied embeddings, are left out.
    """
    waiting: dict[str, set[str]] = {}
    for target, made in plan.items():
        for source in made.sources:
            waiting.setdefault(source, set()).add(target)
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors:
        kept[name] = tensor
        for target in sorted(waiting.get(name, ())):
            made = plan[target]
            if all(source in kept for source in made.sources):
                yield target, made.make(*(kept[source] for source in made.sources)).to(made.dtype or tensor.dtype)
                for source in made.sources:
                    waiting[source].discard(target)
        for done in [source for source in kept if not waiting.get(source)]:
            del kept[done]
