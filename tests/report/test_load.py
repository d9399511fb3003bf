"""Reading results.json, and the errors on what is not one."""

import json

import pytest

from diff_transformer.report import ResultsError, load_results


def test_reads_a_file_and_a_folder(tmp_path, results):
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert load_results(tmp_path / "results.json") == load_results(tmp_path) == results


def test_missing_file_names_it_and_what_to_give(tmp_path):
    with pytest.raises(ResultsError, match=r"no file .*absent\.json; give the results\.json"):
        load_results(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is not JSON"),
        ('{"model": 3}', r"has keys \['model'\] and no \"schema\""),
        ("[1, 2]", "has a list"),
        ('{"schema": 99}', "schema 99; this version reads schema 1"),
        ('{"schema": 1, "evals": [{"attention": "diff"}, {"attention": "dint"}]}', "holds diff, dint"),
    ],
)
def test_foreign_files_are_refused_with_the_reason(tmp_path, content, message):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ResultsError, match=message):
        load_results(path)


def test_binary_file_is_refused(tmp_path):
    path = tmp_path / "results.json"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ResultsError, match="is not JSON"):
        load_results(path)
