"""The kernels with the tiles that GPUs get, most of them not square, in the interpreter, whose own are of 32 by 32."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from diff_transformer.ops import diff_attention
from diff_transformer.ops.triton import backward, backward_form, configurations, forward, interpreted
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


def shipped(kind):
    """All entries of the tables for this kind of kernels."""
    tables = [table for table in vars(configurations).values() if isinstance(table, dict)]
    return [entry for table in tables for entry in table.values() if isinstance(entry, kind)]


def shape(tiles):
    """The tiles that the interpreter sees."""
    parts = [tiles] if isinstance(tiles, configurations.Configuration) else tiles
    return tuple((part.BLOCK_M, part.BLOCK_N, part.fused) for part in parts)


def distinct(kind):
    return list({shape(tiles): tiles for tiles in shipped(kind)}.values())


FORWARD, BACKWARD = distinct(configurations.Configuration), distinct(configurations.Backward)
HOPPER = (configurations.HOPPER_FORWARD[64, 128], configurations.HOPPER_BACKWARD[64, 128])
AMPERE = (configurations.AMPERE_FORWARD[96, 192], configurations.AMPERE_BACKWARD[96, 192])
ROUNDS = max(len(FORWARD), len(BACKWARD))
PAIRS = [(FORWARD[i % len(FORWARD)], BACKWARD[i % len(BACKWARD)]) for i in range(ROUNDS)]


def cases():
    """Two pairs by default, on some of the cases; every shape on all of them with ``-m slow``."""
    often = {"Hopper, width 64": HOPPER, "Ampere, width 96": AMPERE}
    seldom = {f"round {i}": pair for i, pair in enumerate(PAIRS)}
    default = [pytest.param(*pair, case, id=f"{name}, {case}") for name, pair in often.items() for case in OFTEN]
    slow = [(pair, case, f"{name}, {case}") for name, pair in (seldom | often).items() for case in CASES]
    return default + [pytest.param(*pair, case, id=f"all, {name}", marks=pytest.mark.slow) for pair, case, name in slow]


@pytest.mark.parametrize(("of_forward", "of_backward", "case"), cases())
def test_shipped_tiles(monkeypatch, of_forward, of_backward, case):
    given = []

    def record(tiles):
        return lambda *arguments: given.append(tiles) or tiles

    monkeypatch.setattr(forward, "forward_configuration", record(of_forward))
    monkeypatch.setattr(backward, "backward_configuration", record(of_backward))
    torch.use_deterministic_algorithms(False)  # they rule the one pass out
    sizes, options = CASES[case]
    x = make_inputs(**({"B": 1, "H": 1, "D": 16} | sizes))

    def run(x, backend):
        out = diff_attention(*x, backend=backend, **options)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
        return out, *torch.autograd.grad(out, x, dout)

    exact = run(x.to(torch.float64), "reference")
    for form in ("two_pass", "one_pass"):
        with backward_form(form):
            values = run(x, "triton")
        for name, value, true in zip(("out", *x._fields), values, exact, strict=True):
            assert_within_budget(value, true, what=f"{name}, {form}")
    assert given == [of_forward, of_backward] * 2


def test_every_tile_is_tried():
    """Of those that ship, none has a shape that no round has; and they are not those of the interpreter."""
    tried_forward, tried_backward = ({shape(pair[i]) for pair in PAIRS} for i in range(2))
    assert tried_forward == {shape(tiles) for tiles in shipped(configurations.Configuration)}
    assert tried_backward == {shape(tiles) for tiles in shipped(configurations.Backward)}
    assert {shape(HOPPER[0]), shape(AMPERE[0])} <= tried_forward
    for pair in (HOPPER, AMPERE):
        assert all(m != n for tiles in pair for m, n, _ in shape(tiles))
