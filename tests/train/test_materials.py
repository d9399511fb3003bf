import numpy as np
import torch

from diff_transformer.data.packing import PackedCorpus
from diff_transformer.train.training_data import spread_rows


def test_rows_are_spread_over_the_corpus():
    packed = PackedCorpus(np.arange(100, dtype=np.uint16), 10, shuffle=False)
    assert torch.equal(spread_rows(packed, 5)[:, 0], torch.tensor([0, 20, 40, 60, 80]))
