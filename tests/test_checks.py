"""Messages: sizes that are not positive, long lists, errors of other libraries, files that are not JSON."""

import pytest

from diff_transformer.checks import first_line, listed, read_json, require_positive


def test_names_and_values_are_said():
    require_positive(a=1, b=0.5, c=None)
    with pytest.raises(ValueError, match="b is -2; it must be positive"):
        require_positive(a=1, b=-2)
    with pytest.raises(ValueError, match="a is nan"):
        require_positive(a=float("nan"))


def test_long_lists_end_in_a_count():
    assert listed(["a", "b"]) == "a, b"
    assert listed([f"n{i}" for i in range(11)]) == "n0, n1, n2, n3, n4, n5, n6, n7 and 3 more"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one\ntwo"), "one"),
        (OSError(), "OSError"),
        (KeyError("added_tokens"), "KeyError: 'added_tokens'"),
        (Exception("\n no such thing "), "no such thing"),
    ],
)
def test_the_first_line_of_an_error_tells_what_it_is(error, said):
    assert first_line(error) == said


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": "\xff"}', b"[" * 10**5, b"9" * 5000])
def test_a_file_that_is_not_json_is_named(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json is not JSON \(.+\); restore it from a copy$"):
        read_json(tmp_path / "a.json")
