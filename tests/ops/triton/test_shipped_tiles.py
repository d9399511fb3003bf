"""The kernels with the tiles that GPUs get, most of them not square, in the interpreter, whose own are of 32 by 32."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from diff_transformer.ops import diff_attention
from diff_transformer.ops.triton import interpreted, operator, tile_sizes
from diff_transformer.testing import assert_within_budget, make_inputs

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="without TRITON_INTERPRET=1: a GPU has its own tiles in every test"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # NumPy on rows that see nothing
]


def some_keys(T, S):
    mask = torch.rand(1, 1, T, S, generator=torch.Generator().manual_seed(1)) > 0.35
    mask[..., 0] = True
    mask[:, :, 3] = False
    return mask


# name: (arguments of make_inputs beside B = 1, H = 1, D = 16; arguments of diff_attention). The largest tiles have 128.
CASES = {
    "causal": ({"T": 150}, {"is_causal": True}),
    "full, 150 on 190": ({"T": 150, "S": 190}, {}),
    "causal, 33 on 300": ({"T": 33, "S": 300}, {"is_causal": True}),
    "causal, 200 on 33": ({"T": 200, "S": 33}, {"is_causal": True}),
    "window 70": ({"T": 210}, {"is_causal": True, "window": 70}),
    "window 1": ({"T": 200}, {"is_causal": True, "window": 1}),
    "shared noise, grouped keys": ({"H": 4, "Hn": 2, "G": 1, "T": 140}, {"is_causal": True}),
    "odd widths": ({"T": 140, "D": 24, "Dv": 41}, {"is_causal": True}),
    "mask": ({"T": 150}, {"is_causal": True, "attn_mask": some_keys(150, 150)}),
}
OFTEN = ("causal, 33 on 300", "window 70")


KERNELS = ("forward", "dkdv", "dq")
TABLES = [
    table
    for name, table in vars(tile_sizes).items()
    if name.isupper() and isinstance(table, dict) and name != "INTERPRETER"
]


def shape(tile):
    """A tile as the interpreter sees it."""
    return tile.BLOCK_M, tile.BLOCK_N, tile.fused


def shipped(kernel):
    """One tile of each shape, from all tables."""
    entries = [entry for table in TABLES for entry in table[kernel].values()]
    return list({shape(tile): tile for entry in entries for tile in entry}.values())


SHIPPED = {kernel: shipped(kernel) for kernel in KERNELS}
ROUNDS = [
    {kernel: tiles[i % len(tiles)] for kernel, tiles in SHIPPED.items()} for i in range(max(map(len, SHIPPED.values())))
]
HOPPER = {kernel: tile_sizes.HOPPER_TIMED[kernel][128, 256][0] for kernel in KERNELS}
AMPERE = {kernel: tile_sizes.MMA_SYNC[kernel][128, 256][-1] for kernel in KERNELS}


def cases():
    """Two sets of tiles by default, on some of the cases; every shape on all of them with ``-m slow``."""
    often = {"Hopper, width 128": HOPPER, "Ampere, width 128": AMPERE}
    seldom = {f"round {i}": tiles for i, tiles in enumerate(ROUNDS)}
    default = [pytest.param(tiles, case, id=f"{name}, {case}") for name, tiles in often.items() for case in OFTEN]
    slow = [(tiles, case, f"{name}, {case}") for name, tiles in (seldom | often).items() for case in CASES]
    return default + [pytest.param(*given, id=f"all, {name}", marks=pytest.mark.slow) for *given, name in slow]


@pytest.mark.parametrize(("tiles", "case"), cases())
def test_shipped_tiles(monkeypatch, tiles, case):
    given = []

    class Given(dict):
        def __getitem__(self, kernel):
            given.append(kernel)
            return {(128, 256): (tiles[kernel],)}

    monkeypatch.setattr(operator, "table_of", lambda x: Given())
    sizes, options = CASES[case]
    x = make_inputs(**({"B": 1, "H": 1, "D": 16} | sizes))

    def run(x, backend):
        out = diff_attention(*x, backend=backend, **options)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
        return out, *torch.autograd.grad(out, x, dout)

    exact = run(x.to(torch.float64), "reference")
    for name, value, true in zip(("out", *x._fields), run(x, "triton"), exact, strict=True):
        assert_within_budget(value, true, what=name)
    assert given == ["forward", "dkdv", "dq"]


def test_every_tile_is_tried():
    """Of those that ship, none has a shape that no round has; and they are not those of the interpreter."""
    for kernel in KERNELS:
        entries = [entry for table in TABLES for entry in table[kernel].values()]
        assert {shape(tiles[kernel]) for tiles in ROUNDS} == {shape(tile) for entry in entries for tile in entry}
    assert all(tile.BLOCK_M != tile.BLOCK_N for tiles in (HOPPER, AMPERE) for tile in tiles.values())


def test_a_small_chip_gets_tiles_that_fit_it():
    half = torch.bfloat16
    assert tile_sizes.table_for((8, 0), 163 * 1024, half) is tile_sizes.MMA_SYNC
    assert tile_sizes.table_for((8, 6), 99 * 1024, half) is tile_sizes.MMA_SYNC_SMALL
    assert tile_sizes.table_for((12, 0), 99 * 1024, half) is tile_sizes.BLACKWELL_SMALL
    assert tile_sizes.table_for((9, 0), 227 * 1024, half) is tile_sizes.HOPPER
    assert tile_sizes.table_for((10, 0), 227 * 1024, half) is tile_sizes.BLACKWELL
    assert tile_sizes.table_for((9, 0), 227 * 1024, torch.float32) is tile_sizes.FP32
