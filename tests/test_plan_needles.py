"""The needle study: one run from end to end, and what its sweep goes by."""

from dataclasses import replace

import pytest
from needles.plan import CELLS, LENGTHS, MATCHED, SIDES, base, shortfall, stages

from diff_transformer import DiffTransformerConfig
from diff_transformer.lab.record import Record, load_all
from diff_transformer.lab.worker import run
from diff_transformer.model.head_norm_init import matched_head_norm_init
from diff_transformer.train.config import override
from diff_transformer.train.training_data import load_training_data

RATES = dict.fromkeys(SIDES, 1e-3)


@pytest.mark.slow
def test_the_matched_head_norm_is_what_the_untrained_pair_has():
    config = override(base("python"), ["model.attention=diff", "data.max_bytes=2000000"])
    rows = load_training_data(config).validation
    assert matched_head_norm_init(DiffTransformerConfig(**config.model), rows) == pytest.approx(MATCHED, abs=0.02)


def test_a_run_from_end_to_end(tmp_path):
    """Each phase is trained on, the accuracy on needles is in the record, and so is every cell at both lengths."""
    spec = stages("python")[1].specs(RATES)[0]
    config = replace(spec.config)
    config.data = replace(config.data, max_bytes=300_000, phases=[(1, shares) for _, shares in config.data.phases])
    config.train = replace(config.train, steps=4, validate_every=2, batch_size=4, validation_rows=8, checkpoint_every=4)
    config.evaluation = replace(config.evaluation, samples=2, allocation_samples=2)
    replace(spec, config=config).save(tmp_path)
    record = run(tmp_path)
    assert load_all(tmp_path) == [record]
    assert record.curves["needles"]["step"] == [0, 2, 4]
    assert all(0 <= accuracy <= 1 for accuracy in record.curves["needles"]["accuracy"])
    cells = {f"n{needles}_r{asked}_len{length}" for needles, asked in CELLS for length in LENGTHS}
    assert cells <= record.metrics["needle"].keys()
    assert {"answer", "noise", "answer_mean_map", "noise_mean_map"} <= record.metrics["allocation"].keys()


def test_a_sweep_goes_by_the_final_accuracy_and_then_by_the_mean():
    def scored(*accuracy):
        return shortfall(Record("", "", 0, curves={"needles": {"accuracy": list(accuracy)}}))

    assert scored(0.0, 0.2, 0.9) < scored(0.8, 0.85, 0.88)
    assert scored(0.0, 0.8, 0.9) < scored(0.0, 0.7, 0.9)


@pytest.mark.parametrize("step", [0, 1200, 2199, 2200, 3499])
def test_every_phase_has_copies_and_only_the_last_needles(step):
    from diff_transformer.train.training_data import mixture_shares, source_names

    data = stages("python")[1].specs(RATES)[0].config.data
    shares = dict(zip(source_names(data), mixture_shares(data, step), strict=True))
    assert shares["copies"] > 0
    assert (shares["needles"] > 0) == (step >= 2200)
