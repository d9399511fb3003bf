import pytest
from tiny_models import save_alphabet_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_alphabet_model(tmp_path_factory.mktemp("served") / "tiny-diff")
