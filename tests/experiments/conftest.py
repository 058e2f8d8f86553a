import pytest
import tiny


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    tiny.sst5(folder)
    tiny.imdb(folder)
    return folder


@pytest.fixture
def row(tmp_path):
    return lambda **changes: tiny.row(tmp_path / "row.toml", **changes)
