"""The model that a run starts with: drawn from ``train.seed``, or the saved model of ``train.initial_model``.

Each module draws its weights from a generator of its own, seeded by (seed, name of the module). A DIFF Transformer and
its matched Transformer so begin with the same weights wherever these have the same name and shape, and a process that
holds a part of a model draws what one process alone does.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from diff_transformer.data.tokenizer import load_tokenizer, special_tokens_of
from diff_transformer.errors import UserError
from diff_transformer.model.heads import MATCHED
from diff_transformer.train.plan import Plan, resolve


def unfilled_model(plan: Plan, tokenizer, rows: Callable[[], Tensor] | None = None) -> Any:
    """The model of a run in fp32 on the CPU; its weights have values only if they are those of ``plan.source``.

    Args:
        rows: gives tokens ``[B, T]``, on which ``model.head_scale=matched`` is measured.

    Raises:
        UserError: as ``load_initial_model``.
    """
    from transformers.initialization import no_init_weights

    from diff_transformer.model.head_scale import with_matched_scale
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    if plan.source is not None:
        return load_initial_model(plan, tokenizer)
    fields = {**special_tokens_of(tokenizer, plan.model.vocab_size), **plan.config.model}
    config = type(plan.model)(**fields)
    if config.head_scale == MATCHED:
        config = with_matched_scale(config, None if rows is None else rows())
    with no_init_weights():
        model = DiffTransformerForCausalLM(config)
    model.tie_weights()
    return model


@torch.no_grad()
def draw_weights(model: Any, seed: int) -> None:
    """Give the parameters of a model of this package their initial values. They may be sharded, on any device.

    A process draws one whole module at a time, on the CPU, and keeps its part.
    """
    drawn: set[int] = set()
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or drawn.issuperset(map(id, own.values())):  # the output matrix may be the embedding
            continue
        drawn |= set(map(id, own.values()))
        whole = {key: nn.Parameter(torch.empty(p.shape)) for key, p in own.items()}  # fp32, whatever the run's
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest) >> 1)
        module._parameters.update(whole)
        model._init_weights(module)
        module._parameters.update(own)
        for key, parameter in own.items():
            _assign(parameter, whole[key])


def _assign(parameter: Tensor, value: Tensor) -> None:
    """Copy ``value``, which is whole, to this process's part of ``parameter``."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        value = distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None).to_local()
        parameter = parameter.to_local()
    parameter.copy_(value)


def build_model(config: Any, tokenizer, rows: Callable[[], Tensor] | None = None) -> Any:
    """The model that a run of ``config``, a RunConfig, starts with, in fp32 on the CPU; ``rows`` as above.

    Raises:
        UserError: as ``resolve`` and ``load_initial_model``.
    """
    plan = resolve(config)
    model = unfilled_model(plan, tokenizer, rows)
    if plan.source is None:
        draw_weights(model, plan.config.train.seed)
    return model


def load_initial_model(plan: Plan, tokenizer) -> Any:
    """The model in ``plan.source``, in fp32. A model of another library keeps its class and its configuration.

    Fields in ``config.model`` replace those of the saved configuration if the weights stay the same:
    ``rope_parameters``, ``max_position_embeddings``, ``backend`` and the like.

    Raises:
        UserError: if the model was trained with another tokenizer, or does not have the weights that ``config.model``
            asks for.
    """
    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.loading import read_model
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    folder = plan.source
    assert folder is not None
    if (folder / "tokenizer.json").exists() and load_tokenizer(str(folder)).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"the model in {folder} was trained with another tokenizer; set data.tokenizer={folder}")
    if not isinstance(plan.model, DiffTransformerConfig):
        return read_model(folder, dtype=torch.float32)
    settings = plan.model
    for name, value in special_tokens_of(tokenizer, settings.vocab_size).items():
        if name not in plan.config.model:
            setattr(settings, name, value)
    return read_model(folder, DiffTransformerForCausalLM, config=settings, dtype=torch.float32)
