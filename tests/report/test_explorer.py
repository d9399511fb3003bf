"""Attention maps are packed without loss, checked, and kept within the page's budget."""

import base64
import json

import numpy as np
import pytest

from diff_transformer.report import ResultsError
from diff_transformer.report.figure import Figure
from diff_transformer.report.figures import explorer
from diff_transformer.report.models import of_comparison


def b64(values) -> str:
    return base64.b64encode(np.asarray(values, dtype=np.uint8).tobytes()).decode()


def built(results: dict) -> Figure:
    figure = explorer.build(of_comparison(results))
    assert figure is not None
    return figure


def packed_models(results: dict) -> list[dict]:
    body = built(results).body
    start = body.index('id="explorer-data">') + len('id="explorer-data">')
    return json.loads(body[start : body.index("</script>", start)])["examples"]


def test_pack_keeps_the_lower_triangle_row_by_row():
    maps = np.arange(2 * 9).reshape(1, 2, 3, 3)
    packed = base64.b64decode(explorer.pack(b64(maps), 1, 2, 3, "map"))
    assert list(packed) == [0, 3, 4, 6, 7, 8, 9, 12, 13, 15, 16, 17]


@pytest.mark.parametrize(
    ("maps", "message"), [(b64(range(17)), "17 bytes, but 1 layers x 2 heads x 3 x 3"), ("?", "not base64")]
)
def test_maps_of_the_wrong_size_are_refused(maps, message):
    with pytest.raises(ResultsError, match=message):
        explorer.pack(maps, 1, 2, 3, "map")


def test_both_models_of_a_text_share_one_example(results):
    examples = packed_models(results)
    assert [[m["side"] for m in e["models"]] for e in examples] == [["diff", "softmax"], ["diff", "softmax"]]
    assert "second" not in examples[0]["models"][1]


def test_examples_that_most_models_answer_come_first(results):
    first, second = results["explorer"][:2], results["explorer"][2:]
    for entry, said in zip([*first, *second], ("48", "17", "47", "47 ."), strict=True):
        entry["generated"] = said
    assert [e["title"] for e in packed_models(results)] == ["A second text", "One needle"]


def test_examples_beyond_the_budget_are_left_out_and_said_so(results, monkeypatch):
    monkeypatch.setattr(explorer, "BUDGET", 600_000)
    assert len(packed_models(results)) == 1
    assert [f.text[:23] for f in built(results).findings if f] == ["1 example of 2 left out"]


def test_lambda_must_be_one_number_a_layer(results):
    results["explorer"][0]["lambda"] = [0.2]
    with pytest.raises(ResultsError, match="one number for each of 3 layers"):
        explorer.build(of_comparison(results))
