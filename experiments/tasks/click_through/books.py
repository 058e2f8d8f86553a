"""Book-Crossing in memory: whether a reader likes a book, from five ids. There is no time in it."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import duckdb
import ibis
import torch

from experiments.lab.batches import Batch
from experiments.lab.errors import ExperimentError
from experiments.tasks.click_through import expressions
from experiments.tasks.click_through.criteo import MISSING
from experiments.tasks.click_through.in_memory import InMemory
from experiments.tasks.click_through.prepared import SPLITS
from experiments.tasks.click_through.rows import LABEL, batch_of, numbers_of

NAME = "book-crossing"
FEATURES = ("user", "book", "author", "publisher", "year")
COLUMNS = {
    "ratings": {"user_id": "VARCHAR", "isbn": "VARCHAR", "rating": "TINYINT"},
    "books": {"isbn": "VARCHAR", "author": "VARCHAR", "year": "VARCHAR", "publisher": "VARCHAR"},
}
_LIKED = 8  # of 10; a rating of 0 is none


def load(folder: Path, least: int) -> InMemory:
    """Explicit ratings alone, split by a hash of reader and book."""
    connection = ibis.duckdb.connect()
    try:
        rows = connection.create_table("rows", labelled(*(read(connection, folder, name) for name in COLUMNS)))
        training = rows.filter(rows.split == "train")
        maps = {
            feature: connection.create_table(f"map_{feature}", expressions.numbered(training, feature, least))
            for feature in FEATURES
        }
        tables = {feature: 1 + int(numbers.count().execute()) for feature, numbers in maps.items()}
        coded = connection.create_table("coded", expressions.coded(rows, maps, (LABEL, "split", "digest")))
        splits = {split: batch(coded.filter(coded.split == split)) for split in SPLITS}
        unseen = {split: shares_unseen(rows, split) for split in SPLITS[1:]}
    except duckdb.Error as error:
        raise ExperimentError(f"{folder / NAME}: {' '.join(str(error).split())[:300]} Copy it anew.") from None
    finally:
        connection.disconnect()
    return InMemory(tables, splits, unseen, zlib.crc32(splits["train"]["ids"].numpy().tobytes()))


def read(connection: Any, folder: Path, name: str) -> Any:
    """A packed table, refused where a line has other columns."""
    path = folder / NAME / f"{name}.csv.gz"
    if not path.exists():
        raise ExperimentError(f"{path} does not exist; --data takes a folder with all of {NAME}/.")
    form = {"delim": ",", "quote": '"', "escape": '"', "header": True, "auto_detect": False}
    return connection.read_csv(str(path), table_name=name, columns=COLUMNS[name], **form)


def labelled(ratings: Any, books: Any) -> Any:
    """Explicit ratings with what is known of their books, and the split they are in: 80, 10 and 10 percent."""
    explicit = ratings.filter(ratings.rating > 0)
    digest = (explicit.user_id + "," + explicit.isbn).hexdigest("md5")
    joined = explicit.mutate(digest=digest).left_join(books, "isbn")
    tenth = ibis.cases((joined.digest < _share(1), "test"), (joined.digest < _share(2), "validation"), else_="train")
    return joined.select(
        (joined.rating >= _LIKED).cast("int8").name(LABEL),
        joined.digest,
        user=joined.user_id,
        book=joined.isbn,
        **{name: joined[name].fill_null(MISSING) for name in FEATURES[2:]},
        split=tenth,
    )


def _share(tenths: int) -> str:
    """The digest below which so many tenths of all digests are."""
    return f"{tenths * 2**32 // 10:08x}"


def batch(rows: Any) -> Batch:
    """In the order of digests, which is always the same."""
    table = rows.order_by("digest").to_pyarrow()
    return batch_of(torch.tensor(table[LABEL].to_numpy()).float(), torch.tensor(numbers_of(table, FEATURES)))


def shares_unseen(rows: Any, split: str) -> dict[str, float]:
    """Of a split, the share of rows with a value that no training row has."""
    training, others = rows.filter(rows.split == "train"), rows.filter(rows.split == split)
    count = max(int(others.count().execute()), 1)
    return {feature: int(others.anti_join(training, feature).count().execute()) / count for feature in FEATURES}
