"""The instrument itself: a compile check that cannot fail would prove nothing."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="it compiles Triton kernels")

from assembly import unguarded_arrivals
from kernel_compiler import (
    Compiled,
    Description,
    assert_ships,
    compile_in_subprocess,
    describe,
    executed_over_needed,
    faults,
    table_of,
    without_timed_spills,
)

from diff_transformer.ops.call import Call
from diff_transformer.ops.triton import backward, forward, tile_sizes

GOOD = Compiled(
    name="kernel", capability=90, registers=168, spill_bytes=0, spills_in_loops=0, shared_bytes=227 * 1024,
    tensor_columns=0, num_warps=4, wgmma=8, mma=0, products=(), wgmma_serialized=False, unguarded_arrivals=0,
)  # fmt: skip
COMBINE = "diff_transformer.ops.triton.decode_kernels:decode_combine_kernel"
STRIDES = ("i32", "i32:16", 1)
SIGNATURE = {"partial": "*fp32", "lam_at": "*fp32", "first_at": "*fp32", "out": "*bf16"}
SIGNATURE |= {"lam_strides": STRIDES, "first_strides": STRIDES}
SIGNATURE |= dict.fromkeys(("splits", "all_rows", "H", "T"), "i32")
CONSTANTS = {"DV": 64, "COLUMNS": 64, "SPLITS_PAD": 8, "WEIGHTED": False}


ARRIVAL = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["st.shared.v4.b32 [%r1], {%r2};", "bar.sync 2, 128;", ARRIVAL], 0),
        (["bar.sync 2, 128;", "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2};", ARRIVAL], 1),
        (["ld.shared.b32 %r2, [%r1];", ARRIVAL, "bar.warp.sync -1;", ARRIVAL], 1),
        (["ld.shared.b32 %r2, [%r1];", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 64;"], 0),
        (["ld.shared.b32 %r2, [%r1];", "barrier.cta.sync 1;", ARRIVAL], 0),
    ],
)
def test_arrivals_that_do_not_speak_for_all_warps(lines, found):
    assert unguarded_arrivals("\n".join(lines)) == found


@pytest.mark.parametrize(
    ("change", "ships"),
    [
        ({}, True),
        ({"DV": 64}, False),
        ({"BLOCK_N": 32}, False),
        ({"num_stages": 2}, False),
        ({"capability": 80}, False),
    ],
    ids=["timed", "other values", "other tile", "other stages", "other chip"],
)
def test_only_tiles_that_were_timed_may_spill_in_loops(change, ships):
    given = {
        "D": 64,
        "DV": 128,
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "num_warps": 4,
        "num_stages": 3,
        "capability": 90,
    } | change
    options = {name: given.pop(name) for name in ("num_warps", "num_stages")}
    spills = {"spill_bytes": 8, "spills_in_loops": 3, "shared_bytes": 1000, "capability": given.pop("capability")}
    launch = Description("diff_transformer.ops.triton.forward:forward_kernel", {}, given, options)
    assert (faults(without_timed_spills(replace(GOOD, **spills), launch)) == []) == ships


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"spill_bytes": 8, "spills_in_loops": 3},
            r"loads or stores spilled registers 3 times in its loops of products \(8 bytes a thread at 168 registers",
        ),
        ({"wgmma_serialized": True}, "serialises its wgmma instructions"),
        ({"unguarded_arrivals": 2}, "arrives 2 times at an mbarrier with no barrier of the warps before"),
        ({"shared_bytes": 227 * 1024 + 1}, "uses 227 KiB of shared memory; sm_90 has 227"),
        ({"capability": 80}, "uses 227 KiB of shared memory; sm_80 has 163"),
        ({"tensor_columns": 768}, "uses 768 columns of tensor memory; there are 512"),
    ],
    ids=["spill", "serialised", "unguarded", "shared", "smaller chip", "tensor memory"],
)
def test_what_does_not_ship(change, message):
    with pytest.raises(AssertionError, match=message):
        assert_ships(replace(GOOD, **change))


def test_a_spill_is_seen():
    """32 splits of 256 columns in one warp: 256 values a thread, which has 255 registers."""
    wide = {"DV": 256, "COLUMNS": 256, "SPLITS_PAD": 32, "WEIGHTED": False}
    assert compile_in_subprocess(COMBINE, SIGNATURE, wide, capability=80, num_warps=1).spill_bytes > 0
    assert compile_in_subprocess(COMBINE, SIGNATURE, CONSTANTS, capability=80).spill_bytes == 0


def table_with(kernel, size):
    """Tiles of one kernel: this one at all widths."""
    return {kernel: {(128, 256): (size,)}}


def test_a_serialised_wgmma_is_seen():
    """The forward for Hopper with a tile that no register file holds, and with one that it holds with ease."""
    x = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
    v, lam = torch.zeros(1, 2, 128, 128, dtype=torch.bfloat16), torch.zeros(1, 2, 128, 1)
    call = Call(x, x, x, None, v, lam, scale=0.125, is_causal=True)
    tables = [table_with("forward", tile_sizes.TileSize(128, keys, 8, 2, fused=True)) for keys in (32, 128)]
    launches = [describe(launch) for table in tables for launch in forward.plan_forward(call, False, table)[1]]
    good, bad = (compile_in_subprocess(*launch[:3], capability=90, **launch.options) for launch in launches)
    assert good.wgmma > 0
    assert not good.wgmma_serialized
    assert bad.wgmma_serialized
    assert good.spills_in_loops == 0
    assert bad.spills_in_loops > 0


def test_a_product_that_warps_repeat_is_seen():
    """A tile of 16 keys for 8 warps: each of its products is computed several times."""
    x = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
    v, lam = torch.zeros(1, 2, 128, 128, dtype=torch.bfloat16), torch.zeros(1, 2, 128, 1)
    call = Call(x, x, x, None, v, lam, scale=0.125, is_causal=True)
    table = table_of(80, torch.bfloat16) | table_with("dkdv", tile_sizes.TileSize(16, 32, 8, 1, fused=False))
    rows = torch.zeros(1, 2, 128)
    planned = backward.plan_backward(call, v, (v, v, rows, rows), table)[1]
    launches = [describe(launch) for launch in planned]
    launch = next(launch for launch in launches if launch.constexprs.get("COMPUTE_DK"))
    compiled = compile_in_subprocess(*launch[:3], capability=80, **launch.options)
    assert executed_over_needed(launch, compiled) > 1.9
