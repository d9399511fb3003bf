"""The only place where an experiment meets a model.

An experiment uses the methods of ``LanguageModel`` it needs and no others, so that it runs unchanged on the pair, on
any Hugging Face causal LM, and on a ten-line fake.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.checks import require_positive

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class LanguageModel(Protocol):
    name: str
    tokenizer: "PreTrainedTokenizerFast"

    def generate(self, prompts: list[str], max_new_tokens: int) -> list[str]: ...

    def token_losses(self, ids: Tensor) -> Tensor: ...

    def last_row_attention(self, ids: Tensor) -> list[Tensor]: ...


class CausalLM:
    """``LanguageModel`` over a Hugging Face causal LM and its tokenizer.

    Args:
        model: in any dtype, on any device; used in eval mode.
        tokenizer: needs a padding token for ``generate`` with prompts of different lengths.
        name: how results call the model.
        batch_size: prompts or rows in one forward pass.
    """

    def __init__(self, model, tokenizer, name: str, batch_size: int = 32):
        require_positive(batch_size=batch_size)
        self.model, self.tokenizer, self.name, self.batch_size = model.eval(), tokenizer, name, batch_size

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.inference_mode()
    def generate(self, prompts: list[str], max_new_tokens: int) -> list[str]:
        """Greedy continuations of ``prompts``, without the prompts, in their order; batched with left padding."""
        require_positive(max_new_tokens=max_new_tokens)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        texts = [""] * len(prompts)
        for start in range(0, len(order), self.batch_size):
            part = order[start : start + self.batch_size]
            inputs = self.tokenizer(
                [prompts[i] for i in part], return_tensors="pt", padding=True, padding_side="left",
                add_special_tokens=False, return_token_type_ids=False,
            ).to(self.device)  # fmt: skip
            out = self.model.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=self.tokenizer.pad_token_id
            )
            new = out[:, inputs["input_ids"].shape[1] :]
            for i, text in zip(part, self.tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
                texts[i] = text
        return texts

    @torch.inference_mode()
    def token_losses(self, ids: Tensor) -> Tensor:
        """Negative log-likelihood in nats of ``ids[:, 1:]`` given what comes before: fp32 ``[B, T - 1]``."""
        parts = []
        for rows in ids.split(self.batch_size):
            logits = self.model(input_ids=rows.to(self.device), use_cache=False).logits[:, :-1].float()
            losses = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:].to(self.device), reduction="none")
            parts.append(losses.cpu())
        return torch.cat(parts)

    @torch.inference_mode()
    def last_row_attention(self, ids: Tensor) -> list[Tensor]:
        """For each layer, the attention of the last position of ``ids [1, T]`` to all: fp32 ``[heads, T]``.

        Differential attention gives the difference ``A1 - lambda A2``. Only that row is computed: O(T) memory.
        """
        rows: list[Tensor] = []

        def keep(layer: int, core, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool):
            last = None if mask is None else mask[..., -1:, :]
            maps = core.maps(q[:, :, -1:], k, last, is_causal)
            rows.append(getattr(maps, "difference", maps)[0, :, 0].float().cpu())

        with tapped_attention(self.model, keep):
            self.model(input_ids=ids.to(self.device), use_cache=False, logits_to_keep=1)
        return rows


Tap = Callable[[int, torch.nn.Module, Tensor, Tensor, Tensor | None, bool], None]


@contextmanager
def tapped_attention(model, tap: Tap) -> Generator[None]:
    """Call ``tap(layer, core, q, k, mask, is_causal)`` at each layer's attention, after the rotary embedding.

    ``q [B, heads, T, d]`` and ``k [B, heads, S, d]`` are the model's own: the tap must not change them.

    Raises:
        ValueError: for a model that is not built on this package's attention.
    """
    from diff_transformer.model.attention import Attention

    modules = [module for module in model.modules() if isinstance(module, Attention)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no attention of this package to look into; convert it first")

    def hook(layer: int):
        def before(core, args):
            q, k, _, mask, is_causal = args
            tap(layer, core, q, k, mask, is_causal)

        return before

    handles = [module.core.register_forward_pre_hook(hook(i)) for i, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
