"""Every plan of a study in this repository can be run."""

from collections import defaultdict

import pytest

from diff_transformer.lab.stages import FIGURES, PLANS, load_stages
from diff_transformer.model.config import DiffTransformerConfig


@pytest.mark.parametrize("name", [*PLANS, *sorted(path.parent.name for path in FIGURES.glob("*/plan.py"))])
def test_a_plan_is_runs_of_models_that_can_be_made(name):
    stages = load_stages(name)
    specs = [spec for stage in stages for spec in stage.specs(defaultdict(lambda: 1e-3))]
    assert len({spec.key for spec in specs}) == len(specs)
    for fields in {str(spec.config.model): spec.config.model for spec in specs}.values():
        DiffTransformerConfig(**fields)
