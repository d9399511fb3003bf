"""Models in memory: from and to the classes of transformers."""

import copy
from typing import Any

from transformers import DiffLlamaForCausalLM, LlamaForCausalLM, PreTrainedModel

from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert import diffllama, llama
from diff_transformer.model.convert.options import Options
from diff_transformer.model.convert.plan import Conversion, Planned, StateDict
from diff_transformer.model.modeling import DiffTransformerForCausalLM


def from_llama(model: LlamaForCausalLM) -> DiffTransformerForCausalLM:
    """The matched Transformer (``attention="softmax"``) with the weights of a Llama model; equal logits.

    Raises:
        ValueError: if the Llama model has biases or another activation than SiLU, which this architecture lacks.
    """
    return made_of(llama.to_ours(model.config), DiffTransformerForCausalLM, model)


def to_llama(model: DiffTransformerForCausalLM) -> LlamaForCausalLM:
    """The inverse of ``from_llama``.

    Raises:
        ValueError: for differential attention, head norms or a window, which Llama's architecture cannot hold.
    """
    return made_of(llama.from_ours(_config(model), Options()), LlamaForCausalLM, model)


def from_diffllama(model: DiffLlamaForCausalLM) -> DiffTransformerForCausalLM:
    """A model with ``head_norm="no_weight"`` and the weights of a Hugging Face ``DiffLlama``; equal logits.

    Raises:
        ValueError: if it has biases or another activation than SiLU.
    """
    return made_of(diffllama.to_ours(model.config), DiffTransformerForCausalLM, model)


def to_diffllama(model: DiffTransformerForCausalLM) -> DiffLlamaForCausalLM:
    """The inverse of ``from_diffllama``; the weight of the head norm, where there is one, is folded into W_O.

    Raises:
        ValueError: for what ``DiffLlama`` cannot hold (see ``diffllama.from_ours``).
    """
    return made_of(diffllama.from_ours(_config(model), Options()), DiffLlamaForCausalLM, model)


def made_of(conversion: Conversion, kind: type, model: PreTrainedModel) -> Any:
    """A model of ``kind`` with the tensors of ``conversion`` from ``model``, in its dtypes and mode; none is shared.

    It has the same ``generation_config``.

    Buffers, such as the frequencies of the rotary embedding, keep the precision in which they are made.
    """
    target = kind(conversion.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in target.state_dict().items()}
    planned = Planned(StateDict(model.state_dict()), conversion.plan, shapes)
    target.load_state_dict({name: planned.tensor(name).clone() for name in conversion.plan}, strict=False, assign=True)
    target.tie_weights()
    target.generation_config = copy.deepcopy(model.generation_config)
    return target.train(model.training)


def _config(model: DiffTransformerForCausalLM) -> DiffTransformerConfig:
    assert isinstance(model.config, DiffTransformerConfig)
    return model.config
