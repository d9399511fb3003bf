"""A stand-in for the packed attention of PyTorch, which runs on GPUs only."""

import inspect
from itertools import pairwise

import torch


def attention_of_documents(q, k, v, ends_q, ends_k, scale, window):
    """softmax(q k^T scale) v of each document, [rows, heads, width]; a row without keys is 0.

    window: keys before and after a query's own that it sees, -1 for all; the last query's own key is the last one.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    outs = []
    for (a, b), (c, d) in zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True):
        behind = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(
            d - c
        )  # how far a key lies before a query
        seen = torch.ones(b - a, d - c, dtype=torch.bool)
        if window[0] >= 0:
            seen &= behind <= window[0]
        if window[1] >= 0:
            seen &= -behind <= window[1]
        scores = torch.einsum("thd,shd->hts", q[a:b].float(), k[c:d].float()) * scale
        weights = torch.where(seen, scores.clamp(max=80).exp(), 0)  # the tests' scores are small
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        outs.append(torch.einsum("hts,shd->thd", weights, v[c:d].float()).to(q.dtype))
    return torch.cat(outs)


def pytorch_varlen_attn(calls, grouped=True):
    """PyTorch's ``varlen_attn``, with the argument for grouped heads or without, which keeps what it was given."""

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
        assert grouped or query.shape[1] == key.shape[1]
        assert query.shape[2] == key.shape[2] == value.shape[2]
        assert cu_seq_q.diff().max() <= max_q
        assert cu_seq_k.diff().max() <= max_k
        calls.append((query.shape[1:], key.shape[1], options))
        return attention_of_documents(
            query, key, value, cu_seq_q, cu_seq_k, options.get("scale"), options["window_size"]
        )

    names = ["scale", "window_size", *(["enable_gqa"] if grouped else [])]
    kind = inspect.Parameter.KEYWORD_ONLY
    varlen_attn.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return varlen_attn
