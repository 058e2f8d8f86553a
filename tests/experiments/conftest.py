import pytest
import small_files as tiny

from experiments.lab.rows import Bench
from experiments.lab.task import find


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """accelerate keeps the precision of the first run in a process for all later ones."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def data(tmp_path):
    """Data of the task sentiment."""
    folder = tmp_path / "texts"
    tiny.sst5(folder)
    tiny.imdb(folder)
    return folder


@pytest.fixture
def sources(tmp_path):
    """Data of the task source_code, the smallest there is."""
    folder = tmp_path / "sources"
    tiny.sources(folder)
    return folder


@pytest.fixture
def multi30k(tmp_path):
    """Data of the task translation."""
    folder = tmp_path / "pairs"
    tiny.multi30k(folder)
    return folder


@pytest.fixture
def row(tmp_path):
    return lambda **changes: tiny.row(tmp_path / "row.toml", **changes)


@pytest.fixture
def sentiment_row(tmp_path):
    return lambda **changes: tiny.row(tmp_path / "row.toml", tiny.SENTIMENT_ROW, **changes)


@pytest.fixture
def sentiment():
    return find("sentiment")


@pytest.fixture
def source_code():
    return find("source_code")


@pytest.fixture
def bench(sentiment, tmp_path):
    """Of the task that has a search."""
    return Bench(sentiment, tmp_path)
