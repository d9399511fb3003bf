"""Launches the kernels once in each form at small sizes, for compute-sanitizer.

python benchmarks/sanitized.py all cuda      # or "hopper": the Hopper kernels alone
python benchmarks/sanitized.py all cpu       # the same calls without our kernels
python benchmarks/sanitized.py all cpu triton  # with TRITON_INTERPRET=1: the kernels, interpreted
"""

import sys
from collections.abc import Callable

import torch

from diff_transformer.ops import diff_attention, diff_attention_decode, diff_attention_varlen
from diff_transformer.testing import Inputs, make_inputs

T = 200  # more than one tile of each side, and none that is whole at the end
CACHE = 1000  # keys, where a few queries are decoded


def main(what: str, device: str, backend: str | None = None) -> int:
    backend = backend or ("triton" if device == "cuda" else "blockwise")
    for name, run in (forms if what == "all" else hopper_forms)(device, backend).items():
        print(name, flush=True)
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    print("all ran", flush=True)
    return 0


def hopper_forms(device: str, backend: str) -> dict[str, Callable[[], object]]:
    """Calls that Hopper kernels compute: both maskings, forward alone and with the backward."""

    def forward(options: dict) -> Callable[[], object]:
        x = make_inputs(1, 2, T, 128, dtype=torch.bfloat16, device=device, requires_grad=False)
        return lambda: diff_attention(*x, **options, backend=backend)

    found = {}
    for causal in (True, False):
        options = {"is_causal": causal}
        found[f"forward, causal {causal}"] = forward(options)
        found[f"backward, causal {causal}"] = both(device, backend, options, D=128)
    return found


def forms(device: str, backend: str) -> dict[str, Callable[[], object]]:
    """Forward and backward of calls that differ in their memory accesses."""
    mask = torch.rand(1, 2, T, T, device=device) > 0.3
    padding = torch.arange(T, device=device).view(1, 1, 1, T) >= T // 3
    lengths = torch.tensor([CACHE * 2 // 3, 3], dtype=torch.int32, device=device)
    causal, half = {"is_causal": True}, torch.float16
    return {
        "causal": both(device, backend, causal),
        "fp16": both(device, backend, causal, dtype=half),
        "mask": both(device, backend, {"attn_mask": mask}),
        "padding": both(device, backend, causal | {"attn_mask": padding}),
        "window": both(device, backend, causal | {"window": 50}),
        "grouped": both(device, backend, causal, H=4, Hn=2, G=1),
        "documents": documents(device, backend),
        "decode": decode(device, backend),
        "decode, lengths, fp16": decode(device, backend, half, lengths=lengths),
        "decode, mask": decode(device, backend, attn_mask=torch.rand(2, 4, 1, CACHE, device=device) > 0.3),
        "width 128": both(device, backend, causal, D=128),
        "width 96": both(device, backend, causal, D=96),
    }


def both(device: str, backend: str, options: dict, **sizes) -> Callable[[], object]:
    sizes = {"B": 1, "H": 2, "T": T, "D": 64, "dtype": torch.bfloat16} | sizes
    x = make_inputs(**sizes, device=device)
    return lambda: diff_attention(*x, **options, backend=backend).sum().backward()


def documents(device: str, backend: str) -> Callable[[], object]:
    begin, end = T // 3, T
    ends = torch.tensor([0, begin, begin, end], dtype=torch.int32, device=device)
    x = make_inputs(B=1, H=2, T=T, D=64, dtype=torch.bfloat16, device=device)
    rows = Inputs(*(y[0].transpose(0, 1).detach().requires_grad_() for y in x))
    options = {"is_causal": True, "backend": backend}
    return lambda: diff_attention_varlen(*rows, ends, ends, end - begin, end - begin, **options).sum().backward()


def decode(device: str, backend: str, dtype: torch.dtype = torch.bfloat16, **options) -> Callable[[], object]:
    x = make_inputs(B=2, H=4, T=1, S=CACHE, G=2, D=64, dtype=dtype, device=device, requires_grad=False)
    return lambda: diff_attention_decode(*x, **options, backend=backend)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
