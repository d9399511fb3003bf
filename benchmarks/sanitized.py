"""Launch the kernels once in each form at small sizes, to be run under compute-sanitizer.

python benchmarks/sanitized.py all cuda      # or "gluon": the Hopper kernels alone
python benchmarks/sanitized.py all cpu       # the same calls without kernels of ours
"""

import sys
from collections.abc import Callable

import torch

from diff_transformer.ops import diff_attention, diff_attention_decode, diff_attention_varlen
from diff_transformer.ops.triton import backward_form, gluon
from diff_transformer.testing import Inputs, make_inputs

T = 200  # more than one tile of each side, and none that is whole at the end


def main(what: str, device: str) -> int:
    for name, run in (forms if what == "all" else gluon_forms)(device).items():
        print(name, flush=True)
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    print("all ran", flush=True)
    return 0


def gluon_forms(device: str) -> dict[str, Callable[[], object]]:
    """What has Hopper kernels: all widths and both maskings, forward alone and with either backward."""

    def forward(D: int, options: dict) -> Callable[[], object]:
        x = make_inputs(1, 2, T, D, dtype=torch.bfloat16, device=device, requires_grad=False)
        return lambda: diff_attention(*x, **options, backend=backend(device))

    torch.use_deterministic_algorithms(False)
    found = {}
    for D in gluon.WIDTHS:
        for causal in (True, False):
            options, what = {"is_causal": causal}, f"width {D}, causal {causal}"
            found[f"forward, {what}"] = forward(D, options)
            found[f"two passes, {what}"] = both(device, options, D=D)
            found[f"one pass, {what}"] = one_pass(both(device, options, D=D))
    return found


def forms(device: str) -> dict[str, Callable[[], object]]:
    """Forward and backward of what differs in its memory accesses."""
    torch.use_deterministic_algorithms(False)
    mask = torch.rand(1, 2, T, T, device=device) > 0.3
    causal = {"is_causal": True}
    return {
        "causal": both(device, causal),
        "one pass": one_pass(both(device, causal)),
        "mask": both(device, {"attn_mask": mask}),
        "window": both(device, causal | {"window": 50}),
        "grouped": both(device, causal, H=4, Hn=2, G=1),
        "documents": documents(device),
        "decode": decode(device),
        "width 128": both(device, causal, D=128),
        "width 96": both(device, causal, D=96),
    }


def both(device: str, options: dict, **sizes) -> Callable[[], object]:
    x = make_inputs(**({"B": 1, "H": 2, "T": T, "D": 64} | sizes), dtype=torch.bfloat16, device=device)
    return lambda: diff_attention(*x, **options, backend=backend(device)).sum().backward()


def one_pass(run: Callable[[], object]) -> Callable[[], object]:
    def in_one_pass() -> None:
        with backward_form("one_pass"):
            run()

    return in_one_pass


def documents(device: str) -> Callable[[], object]:
    ends = torch.tensor([0, 70, 70, T], dtype=torch.int32, device=device)
    x = make_inputs(B=1, H=2, T=T, D=64, dtype=torch.bfloat16, device=device)
    rows = Inputs(*(y[0].transpose(0, 1).detach().requires_grad_() for y in x))
    options = {"is_causal": True, "backend": backend(device)}
    return lambda: diff_attention_varlen(*rows, ends, ends, 130, 130, **options).sum().backward()


def decode(device: str) -> Callable[[], object]:
    x = make_inputs(B=2, H=4, T=1, S=1000, G=2, D=64, dtype=torch.bfloat16, device=device, requires_grad=False)
    return lambda: diff_attention_decode(*x, backend=backend(device))


def backend(device: str) -> str:
    return "triton" if device == "cuda" else "blockwise"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
