import pytest
import small_files as tiny


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """accelerate keeps the precision of the first run in a process for all later ones."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    tiny.sst5(folder)
    tiny.imdb(folder)
    return folder


@pytest.fixture
def row(tmp_path):
    return lambda **changes: tiny.row(tmp_path / "row.toml", **changes)
