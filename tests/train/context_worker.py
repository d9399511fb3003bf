"""One of several processes: ``python context_worker.py FOLDER``, with torchrun's variables set.

Each computes its part of cases that it also computes alone, in fp64, and writes the largest errors to FOLDER/RANK.json.
"""

import json
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from diff_transformer.model.attention import Attention
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.inputs import Packing, Visible
from diff_transformer.train.context_parallel import SequencePart, _attend_own_queries

BATCH, LENGTH, HIDDEN = 2, 48, 32
PACKED = [0, 5, 6, 40, 48, 49, 96]  # documents of the two rows: long, short, one token, a whole tail
CASES = [
    ("diff", {}), ("diff", {"num_key_value_heads": 8}), ("diff", {"sliding_window": 7}), ("softmax", {}),
    ("softmax", {"sliding_window": 7, "num_key_value_heads": 8}), ("diff_v2", {}), ("grouped_diff", {}),
    ("diff_v3", {}),
]  # fmt: skip


def errors(attention: str, fields: dict, bounds: list[int], context: SequencePart) -> float:
    """The largest difference of output and of gradients of q, k and v between this process's part and the whole."""
    config = DiffTransformerConfig(
        attention=attention,
        hidden_size=HIDDEN,
        num_attention_heads=16,
        head_dim=4,
        signal_heads_per_noise_head=3,
        **fields,
    )
    core = Attention.from_config(config, 0).core.double()
    core.backend = "sdpa" if core.variant.maps == 1 else "reference"
    heads, draw = config.heads, partial(torch.randn, dtype=torch.float64)
    q, k = (draw(BATCH, count, LENGTH, heads.head_dim) for count in (heads.queries, heads.keys))
    v, upstream = (
        draw(BATCH, heads.values, LENGTH, heads.value_dim),
        draw(BATCH, LENGTH, heads.outputs, heads.value_dim),
    )
    lam = gate = None
    if core.variant.maps == 2:
        weights = core.weights(draw(BATCH, LENGTH, HIDDEN))
        lam, gate = (x if x is None else x.detach() for x in weights[:2])
    documents = Packing(torch.tensor(bounds, dtype=torch.int32), max(b - a for a, b in pairwise(bounds)))

    def results(attend, cut) -> list[torch.Tensor]:
        inputs = [cut(x, 2).detach().clone().requires_grad_() for x in (q, k, v)]
        of_tokens, gates = (cut(x, 2) if x is not None and x.dim() == 4 else x for x in (lam, gate))
        visible = Visible(None, True, core.window, documents)
        out = attend(*inputs, of_tokens, visible, gates).unflatten(0, (BATCH, -1))
        (out * cut(upstream, 1)).sum().backward()
        return [out.detach(), *(x.grad for x in inputs)]

    found = results(partial(_attend_own_queries, context, core, core.attend_documents), context.of)
    whole = results(core.attend_documents, lambda x, dim: x)
    dims = (1, 2, 2, 2)
    return max(
        (mine - context.of(all_, dim)).abs().max().item() for mine, all_, dim in zip(found, whole, dims, strict=True)
    )


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    context = SequencePart(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    found = {}
    for attention, fields in CASES:
        for name, bounds in {"joined": [0, LENGTH, 2 * LENGTH], "packed": PACKED}.items():
            torch.manual_seed(0)  # the same inputs on every process
            found[" ".join([attention, name, *fields])] = errors(attention, fields, bounds, context)
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
