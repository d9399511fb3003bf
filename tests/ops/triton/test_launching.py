"""Masks as the kernels take them."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from diff_transformer.ops.triton.launching import kernel_mask
from diff_transformer.ops.triton.tiles import ROW_PER_QUERY

ODD = {
    "odd rows": torch.rand(2, 3, 5, 125),
    "gaps": torch.rand(2, 3, 5, 64)[..., ::2],
    "columns first": torch.rand(2, 3, 32, 16).mT,
    "unaligned": torch.rand(1, 1, 5, 48)[..., 3:35],
    "one batch entry": torch.rand(1, 3, 5, 31),
    "expanded": torch.rand(1, 1, 5, 31).expand(2, 3, 5, 31),
    "expanded heads": torch.rand(2, 1, 5, 31).expand(2, 3, 5, 31),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", ODD.values(), ids=ODD)
def test_rows_of_a_mask_are_aligned(given, dtype):
    given = given > 0.5 if dtype == torch.bool else given.to(dtype)
    mask, steps, _, rows = kernel_mask(given, torch.zeros(1))
    assert rows == ROW_PER_QUERY.value
    assert torch.equal(mask.bool() if dtype == torch.bool else mask, given)
    assert mask.data_ptr() % 16 == 0
    assert steps[2] % 16 == 0
    assert steps[3] == 1
    assert [step != 0 for step in steps[:2]] == [
        size > 1 and given.stride(i) != 0 for i, size in enumerate(given.shape[:2])
    ]


def test_what_is_the_same_for_all_is_copied_once():
    mask, *_ = kernel_mask(ODD["expanded"], torch.zeros(1))
    assert mask.untyped_storage().nbytes() == 5 * 32 * 4


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(2, 1, 5, 32),
        torch.ones(2, 3, 64, 128)[:, :, 16:32],
        torch.ones(2, 1, 1, 31),
        torch.ones(1, 1, 31, 1),
        torch.ones(1, 1, 31, 1).expand(1, 1, 31, 9),
    ],
    ids=["aligned", "part", "for all queries", "for all keys", "expanded over keys"],
)
def test_other_masks_are_taken_as_they_are(given):
    mask, steps, *_ = kernel_mask(given, torch.zeros(1))
    assert mask is given
    assert steps == tuple(0 if size == 1 else step for size, step in zip(given.shape, given.stride(), strict=True))


def test_a_row_that_cannot_be_read_to_its_padded_end_is_copied():
    given = torch.rand(9 * 64 + 57).as_strided((1, 1, 10, 57), (640, 640, 64, 1))
    mask, *_ = kernel_mask(given, torch.zeros(1))
    assert mask is not given
    assert torch.equal(mask, given)
    assert mask.untyped_storage().nbytes() == 10 * 64 * 4
