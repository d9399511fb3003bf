"""The plan of figures/gate_norm_subtraction: its runs, and the constants that it states."""

import copy
from collections import defaultdict

import pytest

from diff_transformer import DiffTransformerConfig
from diff_transformer.lab.spec import side_model
from diff_transformer.lab.stages import FIGURES
from diff_transformer.lab.user_code import load_file
from diff_transformer.model.cost import model_cost
from diff_transformer.model.head_scale import with_matched_scale
from diff_transformer.train.training_data import load_training_data

PLAN = load_file(FIGURES / "gate_norm_subtraction" / "plan.py")


def model_of(side, setting):
    config, fields = PLAN.setting(setting), dict(PLAN.SIDES[side])
    variant = fields.pop("variant")
    config.model |= fields
    config.model |= side_model(config, variant)
    return DiffTransformerConfig(**config.model)


def test_every_run_once():
    specs = [spec for stage in PLAN.stages("python") for spec in stage.specs(defaultdict(lambda: 1e-3))]
    runs = [(spec.setting, spec.side, spec.seed) for spec in specs]
    assert len(runs) == len(set(runs)) == 15 * 4 * 3 + 15 * 20 * 2 + 8 * 4 * 2 + 8 * 5
    sweeps = {seed for folder, _, seed in runs if folder.startswith("sweep/")}
    assert sweeps.isdisjoint(seed for folder, _, seed in runs if not folder.startswith("sweep/"))


def test_sides_cost_the_same():
    counts = [model_cost(model_of(side, "p8_n2")).total_parameters for side in PLAN.SIDES]
    assert counts == pytest.approx([counts[0]] * len(counts), rel=0.005)


def test_the_cells_are_a_factorial():
    """Gate on the result, second map, head norm: all eight combinations."""
    cells = [model_of(side, "p8_n2").variant for side in PLAN.CELLS]
    assert {(cell.gate is not None, cell.maps, cell.head_norm is not None) for cell in cells} == {
        (gate, maps, norm) for gate in (False, True) for maps in (1, 2) for norm in (False, True)
    }


@pytest.mark.parametrize("setting", PLAN.SETTINGS)
def test_the_added_map_has_the_constants_of_v2(setting):
    rows = load_training_data(PLAN.setting(setting)).first_rows()
    assert with_matched_scale(copy.deepcopy(model_of("v2", setting)), rows).head_scale == pytest.approx(
        PLAN.V2_SCALE, rel=0.06
    )
