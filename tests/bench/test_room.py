import torch

from diff_transformer.bench import contenders
from diff_transformer.bench.gates import SHORTER, Gate
from diff_transformer.bench.room import bytes_needed
from diff_transformer.bench.shapes import Shape


def test_a_long_shape_takes_what_is_timed():
    shape = Shape(2, 3, 100_000, 16)
    ours = Gate(Shape(2, 3, 10, 16), torch.float32, "cpu").full[:5]
    theirs = contenders.softmax_inputs(Shape(2, 3, 10, 16), torch.float32, "cpu")
    inputs, output = sum(x.nbytes for x in (*ours, *theirs)), ours[4].nbytes
    assert bytes_needed(shape, torch.float32, 3) == 10_000 * (1.5 * inputs + 3 * 2 * output)
    assert bytes_needed(shape, torch.float32, 4) - bytes_needed(shape, torch.float32, 3) == 10_000 * 2 * output


def test_a_wide_batch_takes_the_maps_of_the_reference():
    small, large = (bytes_needed(Shape(batch, 8, SHORTER, 8), torch.bfloat16, 2) for batch in (1, 64))
    assert large == 64 * small
    assert large > 64 * 8 * SHORTER**2 * 8 * 8
