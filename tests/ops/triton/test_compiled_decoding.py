"""The decoding kernels as they would be launched, compiled without a GPU.

No spilled register, no serialised wgmma, no more shared memory than the chip has: the paper's most used widths by
default, all widths, dtypes and calls on sm_80 and 90 and the main ones on four more chips with ``-m slow``.
"""

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from kernel_compiler import assert_ships, compile_in_subprocess, describe, executed_over_needed

from diff_transformer.ops.call import check
from diff_transformer.ops.triton import decode
from diff_transformer.ops.triton.tile_sizes import chunks
from diff_transformer.testing import make_inputs

CAPABILITIES = [80, 90]
OTHERS = [86, 89, 100, 120]  # the main widths and calls
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS = [(16, 32), (32, 64), (64, 64), (64, 128), (96, 192), (128, 128), (128, 256)]
MAIN = [(64, 64), (64, 128), (96, 192), (128, 128), (128, 256)]
WIDTHS += [(40, 80), (48, 96), (80, 160), (112, 224)]


def often_and_seldom(often, *axes):
    """Parameters of a test: the product of the axes, all that is not in ``often`` marked slow."""
    return [pytest.param(*case, marks=() if case in often else pytest.mark.slow) for case in product(*axes)]


# What a call can ask of the decoding kernel: multiprocessors of the GPU (1: one split), arguments of make_inputs and of
# plan_decode.
DECODING: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "plain": (132, {}, {}),
    "one of each": (132, {"B": 1, "H": 1}, {}),  # sizes of 1 become constants
    "one split": (1, {}, {}),
    "most splits": (10_000, {}, {}),
    "lengths": (132, {"T": 3, "G": 2}, {"is_causal": True, "lengths": torch.ones(2, dtype=torch.int32)}),
    "one key for both": (132, {"one_key": True}, {}),
    "padding": (132, {}, {"attn_mask": torch.ones(2, 1, 1, 200, dtype=torch.bool)}),
    "everything": (
        1,
        {"T": 8, "G": 2, "Hn": 2},
        {
            "is_causal": True,
            "window": 100,
            "attn_mask": torch.ones(2, 4, 8, 200, dtype=torch.bool),
            "lengths": torch.ones(2, dtype=torch.int32),
        },
    ),
}
OFTEN = [
    ("bf16", (64, 128), "padding"),
    ("bf16", (128, 256), "everything"),
]


def launches_of_decoding(monkeypatch, dtype, widths, case, capability):
    multiprocessors, asked, options = DECODING[case]
    monkeypatch.setattr(decode, "MIN_KEYS_PER_SPLIT", 1)
    D, Dv = widths
    sizes: dict[str, Any] = {"B": 2, "H": 4, "T": 1, "S": 200, "D": D, "Dv": Dv, "requires_grad": False} | asked
    one_key = sizes.pop("one_key", False)
    x = make_inputs(**sizes, dtype=DTYPES[dtype])
    if one_key:
        x = x._replace(k2=x.k1)
    mask, is_causal, window = options.get("attn_mask"), options.get("is_causal", False), options.get("window")
    planned = decode.plan_decode(check(*x, mask, is_causal, window), options.get("lengths"), multiprocessors)
    return [describe(launch) for launch in planned[1]]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("dtype", "widths", "case"), often_and_seldom(OFTEN, DTYPES, WIDTHS, DECODING))
def test_decoding(monkeypatch, dtype, widths, case, capability):
    compile_and_check(monkeypatch, dtype, widths, case, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", OTHERS)
@pytest.mark.parametrize("case", ["plain", "one key for both", "everything"])
@pytest.mark.parametrize("widths", MAIN)
def test_decoding_on_other_chips(monkeypatch, widths, case, capability):
    compile_and_check(monkeypatch, "bf16", widths, case, capability)


def compile_and_check(monkeypatch, dtype, widths, case, capability):
    launches = launches_of_decoding(monkeypatch, dtype, widths, case, capability)
    assert [launch.kernel.partition(":")[2] for launch in launches] == [
        "decode_split_kernel",
        *(["decode_combine_kernel"] if DECODING[case][0] > 1 else []),
    ]
    compiled = [compile_in_subprocess(*launch[:3], capability=capability, **launch.options) for launch in launches]
    for kernel in compiled:
        assert_ships(kernel)
        assert_ships(kernel, 86 if capability == 80 else 90)  # what serves an A100 must fit an RTX 3090 as well
    size = DTYPES[dtype].itemsize
    if dtype != "fp32" and widths in MAIN and case in ("plain", "one key for both"):
        assert executed_over_needed(launches[0], compiled[0]) <= 1.1
    one_tile = decode.tile(*widths, size, False).keys * (2 * sum(chunks(widths[0])) + sum(chunks(widths[1]))) * size
    if case != "one key for both":
        assert compiled[0].shared_bytes > one_tile, "not pipelined: less than one tile of K1, K2 and V is held"
