"""Which keys a query may attend to: the causal limit, the window, and masks.

Query t of T has the key position t + S - T, so that the last query is aligned to the last key (lower right corner).
With causal attention it sees the keys up to that position, with a window of w the last w of those.

Shapes: B batch, H heads, T queries, S keys; attn_mask is None or [B|1, H|1, T|1, S|1].
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def position_mask(T: int, S: int, is_causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """True where a query may see a key by its position, [T, S]; None where every query may see every key."""
    if not is_causal or (T == 1 and (window is None or window >= S)):
        return None
    own = torch.arange(S - T, S, device=device)[:, None]
    key = torch.arange(S, device=device)
    seen = key <= own
    return seen if window is None else seen & (key > own - window)


def apply_masks(scores: Tensor, seen: Tensor | None, attn_mask: Tensor | None) -> Tensor:
    """Scores with -inf wherever ``seen`` or a boolean ``attn_mask`` is False; an additive ``attn_mask`` is added."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + cast_mask(attn_mask, scores.dtype)
    elif attn_mask is not None:
        seen = attn_mask if seen is None else seen & attn_mask
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))


def cast_mask(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive attn_mask in another dtype, in which values that were finite stay finite."""
    cast = attn_mask.to(dtype)
    if torch.finfo(dtype).max >= torch.finfo(attn_mask.dtype).max:
        return cast
    lowest = torch.finfo(dtype).min
    return torch.where(attn_mask == float("-inf"), cast, cast.clamp_min(lowest))


def one_mask(seen: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """``seen`` and attn_mask in one mask, boolean or additive; None for neither."""
    if seen is None or attn_mask is None:
        return attn_mask if seen is None else seen
    return seen & attn_mask if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~seen, float("-inf"))


def fully_masked_rows(
    T: int, S: int, is_causal: bool, window: int | None, attn_mask: Tensor | None, device: torch.device
) -> Tensor | None:
    """True for queries that may attend to no key, [B|1, H|1, T, 1]; None if there can be none.

    Kernels return different values for such rows, among them NaN. Callers unmask these rows, so that values and
    gradients stay finite, and set them to 0 afterwards.
    """
    if attn_mask is None:
        before_the_first_key = torch.arange(T, device=device) < T - S
        return before_the_first_key[None, None, :, None] if is_causal and T > S else None
    allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask != float("-inf")
    if is_causal and allowed.shape[2] == 1:  # a mask of the keys: count them up to each query, in O(T + S)
        counts = pad(allowed.expand(*allowed.shape[:2], 1, S).cumsum(-1), (1, 0))  # [B|1, H|1, 1, S + 1]
        after = torch.arange(S - T + 1, S + 1, device=device)  # the first key that each query may not see
        first = after - (S if window is None else window)
        return (counts[..., after.clamp_min(0)] == counts[..., first.clamp_min(0)]).transpose(2, 3)
    seen = position_mask(T, S, is_causal, window, device)
    allowed = allowed if seen is None else seen & allowed
    return ~allowed.expand(*allowed.shape[:2], T, S).any(-1, keepdim=True)
