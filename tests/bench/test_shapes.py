import pytest

from diff_transformer.bench.shapes import Shape, default_grid, parse_shapes


def test_the_unit_counts_pairs():
    seen = sum(key <= query for query in range(7) for key in range(7))
    assert Shape(2, 3, 7, 5).unit == 2 * 3 * seen * 5
    assert Shape(2, 3, 7, 5, causal=False).unit == 2 * 3 * 49 * 5


def test_grids_cover_the_goals():
    cpu = {(s.length, s.width) for s in default_grid("cpu", full=True)}
    assert {(n, d) for n in (512, 1024, 2048, 4096, 8192) for d in (32, 64, 128)} <= cpu
    gpu = default_grid("cuda:0", full=True)
    lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    expected = {(n, d, c) for n in lengths for d in (64, 96, 128) for c in (True, False)}
    assert {(s.length, s.width, s.causal) for s in gpu} == expected
    assert {(s.length, s.causal) for s in default_grid("cuda:0", full=False)} == {(4096, True), (2048, True)}
    for shape in gpu:
        assert parse_shapes(str(shape)) == [shape]
    assert parse_shapes("4x12x4096x128, 1x2x33x8n") == [Shape(4, 12, 4096, 128), Shape(1, 2, 33, 8, False)]


@pytest.mark.parametrize("text", ["", "4x4", "1x2x3x4m", "1x00x8x8", "axbxcxd"])
def test_text_that_is_no_shape(text):
    with pytest.raises(ValueError, match="is not a shape; give batch x heads x length x width"):
        parse_shapes(text)
