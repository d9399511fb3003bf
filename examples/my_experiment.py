"""An experiment of your own: how well does a model continue a sequence that it has just seen?

diff-transformer eval examples/my_experiment.py --model FOLDER --out runs/repeat --set length=32
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result


@dataclass(frozen=True)
class Settings:
    """The only place of defaults; options such as --samples and ``--set FIELD=VALUE`` change them."""

    samples: int = 64  # sequences
    length: int = 32  # tokens of each, before it is repeated
    seed: int = 0  # of the draw


QUICK = {"samples": 8, "length": 16}  # what --quick changes


def run(lm, settings: Settings, samples: Samples) -> Result:
    """Draw random tokens, repeat them, and measure the loss on the repetition; ``lm`` is a CausalLM."""
    draw = torch.Generator().manual_seed(settings.seed)
    once = torch.randint(len(lm.tokenizer), (settings.samples, settings.length), generator=draw)
    twice = torch.cat([once, once], dim=1)  # [samples, 2 * length]

    def score(batch: Sequence[torch.Tensor]) -> list[dict]:  # a row for each
        ids = torch.stack([*batch])
        losses = lm.token_losses(ids)[:, settings.length :]  # nats, of the tokens after the first of the repetition
        return [{"loss": float(row.mean())} for row in losses]

    rows = samples.rows("repeat", list(twice), score, batch_size=16)
    return Result("my_experiment", rows)  # every column of numbers is shown as its mean
