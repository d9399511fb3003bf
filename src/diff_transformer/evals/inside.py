"""Looking inside the attention of any causal LM, and changing its logits, layer by layer.

    with tapped_attention(model, tap):        tap(call) at each layer; the model computes what it always does
    with changed_logits(model, plan):         each layer computes softmax(plan(call)(logits)) V instead

A ``call`` is the same for this package's attention, for DiffLlama, and for the softmax attention of every model that
goes through transformers' attention interface (Llama, Qwen, GPT-2, ...).
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from diff_transformer.evals.attention_call import BLOCK, AttentionCall, Change, Finish, Original, Plan, Tap
from diff_transformer.evals.foreign_attention import INTERFACE, Foreign, Interface
from diff_transformer.evals.own_attention import own_attention

__all__ = ["BLOCK", "AttentionCall", "Change", "changed_logits", "layers_of", "output_of", "tapped_attention"]


@contextmanager
def tapped_attention(model: nn.Module, tap: Tap) -> Generator[None]:
    """Call ``tap(call)`` at each layer's attention. Every output of the model is, bit for bit, what it is without.

    Raises:
        ValueError: for a model whose attention cannot be seen, saying why.
    """

    def look(call: AttentionCall, original: Original, finish: Finish, again: bool) -> Any:
        if not again:
            tap(call)
        return original()

    with _intercepted(model, look):
        yield


@contextmanager
def changed_logits(model: nn.Module, plan: Plan) -> Generator[None]:
    """Recompute every layer's attention, in fp32 and in blocks of queries, with the logits that ``plan`` makes.

    ``plan(call)`` gives a function that takes the logits of a block (a tuple of one map or two, ``[B, H, t, S]``) and
    where they are allowed, and returns the logits to use. Afterwards, also after an exception, the model is as before.

    Raises:
        ValueError: for a model whose attention cannot be seen, saying why.
    """

    def recompute(call: AttentionCall, original: Original, finish: Finish, again: bool) -> Any:
        return finish(plan(call))

    with _intercepted(model, recompute):
        yield


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a causal LM, in order: what they return is the residual stream after them.

    Raises:
        ValueError: for a model without a list of ``config.num_hidden_layers`` layers.
    """
    config = getattr(model, "config", None)
    count = None if config is None else getattr(config.get_text_config(), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and count and len(module) == count:
            return list(module)
    raise ValueError(
        f"{type(model).__name__} has no list of layers as long as its configuration says (num_hidden_layers: {count}); "
        "give a Hugging Face causal LM"
    )


def output_of(layer_output: Any) -> Tensor:
    """The hidden states ``[B, T, width]`` of what a layer returns: a tensor, or a tuple that begins with it."""
    return layer_output[0] if isinstance(layer_output, tuple) else layer_output


@contextmanager
def _intercepted(model: nn.Module, handle: Callable) -> Generator[None]:
    """``handle(call, original, finish, again)`` instead of each attention; its result is what the layer goes on with.

    ``finish(change)`` computes that result from changed logits; ``again`` is True where a layer that calls its
    attention twice with the same queries and keys does so for the second time.
    """
    from diff_transformer.model.attention import Attention

    own = [module for module in model.modules() if isinstance(module, Attention)]
    with ExitStack() as stack:
        if own:
            for layer, module in enumerate(own):
                stack.enter_context(_attribute(module.core, "attend", own_attention(module.core, layer, handle)))
            yield
            return
        foreign = Foreign(model, handle)
        for namespace, interface in foreign.namespaces():
            stack.enter_context(_attribute(namespace, INTERFACE, Interface(interface, foreign)))
        body = getattr(model, "base_model", model)
        stack.callback(body.register_forward_hook(foreign.check).remove)
        yield


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Generator[None]:
    """``owner.name`` is ``value`` inside the context, and afterwards what it was."""
    before = vars(owner)
    there, old = name in before, before.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if there:
            setattr(owner, name, old)
        else:
            delattr(owner, name)
