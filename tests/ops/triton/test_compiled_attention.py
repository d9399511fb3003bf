"""The forward and backward kernels as they would be launched, compiled without a GPU.

No spilled register in a loop of products, and none at all in causal calls at the main widths, but for tiles that were
timed as they are; no serialised wgmma, no more memory than the chip has, and at the main widths no product computed
twice: some widths of the paper's models and calls that once spilled by default; all widths, dtypes and maskings, and
for each width the heaviest combinations of what takes registers, with ``-m slow``. Of fp32, which uses no tensor cores,
causal attention is held to the bytes it is known to spill, other calls to shared memory.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from kernel_compiler import (
    SHARED_LIMIT,
    assert_ships,
    compile_in_subprocess,
    describe,
    executed_over_needed,
    table_of,
    without_timed_spills,
)

from diff_transformer.ops.call import check, replace
from diff_transformer.ops.triton import backward, forward
from diff_transformer.testing import make_inputs

LENGTH, ODD = 128, 125
WIDTHS = [(16, 32), (32, 64), (64, 64), (40, 80), (64, 128), (80, 160), (96, 192), (128, 128), (128, 256)]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# name: (arguments of make_inputs, of the operator, of the launchers)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {"is_causal": True}, {}),
    "full": ({}, {}, {}),
    "one of each": ({"B": 1, "H": 1}, {"is_causal": True}, {}),
    "window": ({}, {"is_causal": True, "window": 50}, {}),
    "padding": ({}, {"is_causal": True, "attn_mask": torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)}, {}),
    "mask": ({}, {"attn_mask": torch.ones(2, 4, LENGTH, LENGTH, dtype=torch.bool)}, {}),
    "bias": ({}, {"attn_mask": torch.ones(4, LENGTH, LENGTH)}, {}),
    "half bias": ({}, {"attn_mask": torch.ones(4, LENGTH, LENGTH)}, {"half": True}),
    "query bias": ({}, {"attn_mask": torch.ones(4, LENGTH, 1)}, {}),
    "odd": ({"T": ODD}, {"is_causal": True}, {}),
    "odd mask": ({"T": ODD}, {"attn_mask": torch.ones(2, 4, ODD, ODD, dtype=torch.bool)}, {}),
    "odd bias": ({"T": ODD}, {"attn_mask": torch.ones(4, ODD, ODD)}, {}),
    "grouped": ({"H": 8, "Hn": 4, "G": 2}, {"is_causal": True}, {}),
    "one key for both": ({}, {"is_causal": True}, {"shared_keys": True}),
    "negative scale": ({}, {"is_causal": True, "scale": -0.5}, {}),
    "documents": ({"B": 1}, {"is_causal": True}, {"varlen": True}),
    "first map weighted": ({}, {"is_causal": True, "first": torch.ones(4)}, {}),
    "no gradient": ({}, {"is_causal": True}, {"need_gradient": False}),
}
WINDOW = {"is_causal": True, "window": 50}
SHARED_HEADS = {"H": 8, "Hn": 4, "G": 2}  # signal heads share noise heads, and both share keys
FULL_MASK, FULL_BIAS = torch.ones(2, 8, LENGTH, LENGTH, dtype=torch.bool), torch.ones(8, LENGTH, LENGTH)
# Everything at once that takes registers, as far as it goes together.
COMBINED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "documents, window, grouped": ({"B": 1} | SHARED_HEADS, WINDOW, {"varlen": True}),
    "documents, window, grouped keys": ({"B": 1, "H": 8, "G": 2}, WINDOW, {"varlen": True}),
    "documents, window, grouped noise heads": ({"B": 1, "H": 8, "Hn": 4, "G": 4}, WINDOW, {"varlen": True}),
    "documents, window, grouped, one key": ({"B": 1, "H": 8, "G": 2}, WINDOW, {"varlen": True, "shared_keys": True}),
    "window, mask, grouped": (SHARED_HEADS, WINDOW | {"attn_mask": FULL_MASK}, {}),
    "window, bias": ({}, WINDOW | {"attn_mask": FULL_BIAS[:4]}, {}),
    "window, half bias, grouped": (SHARED_HEADS, WINDOW | {"attn_mask": FULL_BIAS}, {"half": True}),
    "window, grouped": (SHARED_HEADS, WINDOW, {}),
    "documents, grouped": ({"B": 1} | SHARED_HEADS, {"is_causal": True}, {"varlen": True}),
    "documents, window": ({"B": 1}, WINDOW, {"varlen": True}),
}
CASES |= COMBINED
FORMS = ("mask", "bias", "half bias", "query bias", "odd mask", "odd bias")
FP32_SPILLS = {  # bytes a thread; of (80, 160) as much with 4 warps or another limit of registers
    ((80, 160), 90): 8, ((64, 64), 100): 8,
    ((128, 128), 86): 16, ((128, 128), 89): 16, ((128, 128), 100): 32, ((128, 128), 120): 32,
    ((128, 256), 86): 16, ((128, 256), 89): 16, ((128, 256), 100): 40, ((128, 256), 120): 24,
}  # fmt: skip
MOST = 1.1  # products executed over those needed
MAIN = [(64, 64), (64, 128), (96, 192), (128, 128), (128, 256)]
PAPER = [(64, 128), (96, 192), (128, 256)]
OFTEN = [
    (("bf16", (64, 128), "causal"), 80),
    (("bf16", (96, 192), "causal"), 120),
    (("bf16", (64, 128), "odd mask"), 90),
    (("bf16", (128, 256), "first map weighted"), 90),
]
SPILLED = [  # with programs that kept in registers what can be worked out anew
    pytest.param("bf16", (64, 64), "documents, window", 80, id="bf16, 64 and 64, documents, window, Ampere"),
    *(
        pytest.param(*call, id=name, marks=pytest.mark.slow)
        for name, call in {
            "bf16, 64, window, grouped, Hopper": ("bf16", (64, 128), "window, grouped", 90),
            "bf16, 128, documents, grouped, Hopper": ("bf16", (128, 256), "documents, grouped", 90),
            "bf16, 128, window, grouped, Ampere": ("bf16", (128, 256), "window, grouped", 80),
            "fp16, 128 and 128, window, bias, Ampere": ("fp16", (128, 128), "window, bias", 80),
        }.items()
    ),
]
BETWEEN = [(48, 96), (56, 112), (112, 224), (64, 256), (16, 256), (48, 256), (32, 128), (128, 64)]
CORNERS = [(dtype, widths, case) for dtype in ("bf16", "fp16") for widths in WIDTHS + BETWEEN for case in COMBINED]
EVERYWHERE = [(dtype, widths, "causal") for dtype in DTYPES for widths in WIDTHS] + CORNERS
EVERYWHERE += [("bf16", widths, case) for widths in PAPER for case in CASES]
EVERYWHERE += [(dtype, widths, case) for dtype in ("bf16", "fp16") for widths in WIDTHS for case in FORMS]
EVERYWHERE += [("fp32", widths, case) for widths in [(64, 128), (128, 256)] for case in CASES]
SELDOM = [(call, capability) for call in EVERYWHERE for capability in (80, 90)]
SELDOM += [(("bf16", widths, case), capability) for widths in MAIN for case in CASES for capability in (86, 100)]
SELDOM += [(("bf16", widths, case), c) for widths in MAIN for case in ("causal", *COMBINED) for c in (89, 120)]
SELDOM += [((dtype, widths, "causal"), c) for dtype in ("fp16", "fp32") for widths in MAIN for c in (86, 89, 100, 120)]


def launches(capability, dtype, widths, case) -> list:
    """Descriptions of everything that a call and its backward launch on a GPU of that capability."""
    sizes, options, form = CASES[case]
    sizes = {"H": 4, "T": LENGTH, "strided": True} | sizes | dict(zip(("D", "Dv"), widths, strict=True))
    x = make_inputs(**sizes, dtype=DTYPES[dtype], requires_grad=False)
    call = check(*x, **options)
    attn_mask = call.attn_mask
    if form.get("half"):
        attn_mask = attn_mask.to(DTYPES[dtype])
    k2 = None if form.get("shared_keys") else x.k2
    cu_seqlens = torch.tensor([0, 50, LENGTH], dtype=torch.int32) if form.get("varlen") else None
    call = replace(call, k2=k2, attn_mask=attn_mask, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    need_gradient, table = form.get("need_gradient", True), table_of(capability, DTYPES[dtype])
    (_, *saved), launches = forward.plan_forward(call, need_gradient, table)
    if need_gradient:
        launches += backward.plan_backward(call, saved[0], saved, table)[1]
    return [describe(launch) for launch in launches]


@pytest.mark.parametrize(
    ("dtype", "widths", "case", "capability"),
    [
        pytest.param(
            *call,
            capability,
            id=f"{call[0]}, {call[1][0]} and {call[1][1]}, {call[2]}, sm_{capability}",
            marks=() if (call, capability) in OFTEN else pytest.mark.slow,
        )
        for call, capability in dict.fromkeys(OFTEN + SELDOM)
    ],
)
def test_ships(dtype, widths, case, capability):
    compile_and_check(dtype, widths, case, capability)


@pytest.mark.parametrize(("dtype", "widths", "case", "capability"), SPILLED)
def test_combinations_that_spilled(dtype, widths, case, capability):
    compile_and_check(dtype, widths, case, capability)


def compile_and_check(dtype, widths, case, capability):
    recorded = launches(capability, dtype, widths, case)
    names = {launch.kernel.partition(":")[2] for launch in recorded}
    expected = {"forward_kernel", "delta_kernel", "bwd_dkdv_kernel", "bwd_dq_kernel"}
    if case == "no gradient":
        expected = {"forward_kernel"}
    assert names == expected
    compiled = [compile_in_subprocess(*launch[:3], capability=capability, **launch.options) for launch in recorded]
    for launch, kernel in zip(recorded, compiled, strict=True):
        if dtype == "fp32":
            assert kernel.shared_bytes <= SHARED_LIMIT[capability]
            assert case != "causal" or kernel.spill_bytes <= FP32_SPILLS.get((widths, capability), 0)
            continue
        kernel = without_timed_spills(kernel, launch)
        assert_ships(kernel)
        assert not kernel.spill_bytes or case != "causal" or widths not in MAIN
        if kernel.name != "delta_kernel":
            assert kernel.products, "no tensor cores"
            if widths in MAIN:
                assert executed_over_needed(launch, kernel) <= MOST
