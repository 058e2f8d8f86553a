"""Small files in the formats of the real ones."""

import gzip
import json
import random
from pathlib import Path

WORDS = ["good", "bad", "film", "It", "it", "is", "not", "very", "a", "the", "plot", "dull", "great", "."]


def tree(words, label):
    """A right-branching tree over the words."""
    inner = f"(2 {words[-1]})"
    for word in reversed(words[:-1]):
        inner = f"(2 (2 {word}) {inner})"
    return f"({label}{inner[2:]}"


def pack(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


def sentence(draw, label):
    words = draw.choices(WORDS, k=draw.randint(2, 5))
    return [*words, "great" if label >= 3 else "dull"]


def sst5(folder: Path, sizes=(60, 20, 20)):
    draw = random.Random(1)
    for name, size in zip(("train", "dev", "test"), sizes, strict=True):
        labels = [draw.randrange(5) for _ in range(size)]
        pack(folder / "sst5" / f"{name}.txt.gz", [tree(sentence(draw, label), label) for label in labels])


def imdb(folder: Path, sizes=(60, 20)):
    draw = random.Random(2)
    for name, size in zip(("train", "test"), sizes, strict=True):
        lines = [
            json.dumps({"text": " ".join(sentence(draw, 4 * label)) + "<br />end", "label": label, "id": k})
            for label in (0, 1)
            for k in range(size // 2)
        ]
        pack(folder / "imdb" / f"{name}.jsonl.gz", lines)


def wikitext(folder: Path, sizes=(60, 20, 20)):
    """As the original has them: words and signs with spaces around, headings, empty lines."""
    draw = random.Random(3)
    for name, size in zip(("train", "valid", "test"), sizes, strict=True):
        lines = [f" {' '.join(draw.choices(WORDS, k=draw.randint(3, 8)))} " for _ in range(size)]
        pack(folder / "wikitext-2" / f"{name}.txt.gz", [" ", " = The <unk> = ", *lines])


GERMAN = {"a": "ein", "the": "der", "dog": "Hund", "man": "Mann", "big": "große", "runs": "läuft", "sees": "sieht"}
MULTI30K = ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2018_flickr", "test_2017_mscoco")


def translated(draw, longest=6):
    """A sentence and its translation, word by word."""
    words = draw.choices(list(GERMAN), k=draw.randint(1, longest))
    return " ".join(words), " ".join(GERMAN[word] for word in words)


def multi30k(folder: Path, sizes=(60, 12, 12, 6, 6, 6)):
    draw = random.Random(4)
    for name, size in zip(MULTI30K, sizes, strict=True):
        sides = zip(*(translated(draw) for _ in range(size)), strict=True)
        for language, lines in zip(("en", "de"), sides, strict=True):
            pack(folder / "multi30k" / f"{name}.{language}.gz", lines)


# More tokens than tiny models have positions: a word each, at least.
LONG = " ".join(map(str, range(60)))


def change_lines(path, change):
    """A packed file, with its lines as bytes changed."""
    lines = gzip.decompress(path.read_bytes()).split(b"\n")[:-1]
    path.write_bytes(gzip.compress(b"".join(line + b"\n" for line in change(lines))))


SENTIMENT_ROW = """
dataset = "sst5"
row = "tiny"
format = "tt"
rank = 2
shape = [[4, 5], [2, 4]]
vocabulary = 20
dim = 8
hidden = 4
batch = 8
epochs = 3
precision = "fp32"
"""

# The smallest task there is: what holds of any is shown with it.
ROW = """
dataset = "python"
row = "tiny"
format = "tt"
rank = 2
vocabulary = 40
dim = 8
batch = 4
window = 4
steps = 24
validations = 3
"""

SOURCE = '''def area(width, height=1):
    """How much there is."""
    total = width * height ** 2
    if total >= 10 and width != height:
        return total // 2

    return {"area": total, "wide": width}  # of size %d
'''


def sources(folder: Path):
    """Forty files, two of them for validation, and others that are no part of a corpus."""
    folder.mkdir(parents=True)
    for k in range(40):
        (folder / f"file_{k:02}.py").write_text(SOURCE * 6 + f"only_in_{k:02} = {k}\n")
    for skipped in ("test/test_area.py", "site-packages/other.py", "_sysconfigdata_here.py", "notes.txt"):
        path = folder / skipped
        path.parent.mkdir(exist_ok=True)
        path.write_text("skipped = 1\n")


def row(path: Path, content: str = ROW, **changes):
    """A configuration that trains in a blink."""
    lines = [line for line in content.strip().splitlines() if line.split(" = ")[0] not in changes]
    lines += [f"{name} = {json.dumps(value)}" for name, value in changes.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def criteo_rows(count=600, seed=7):
    """Raw rows of Criteo's format, some fields missing, the later ones with values that the earlier ones have not."""
    draw = random.Random(seed)
    rows = []
    for k in range(count):
        numbers = ["" if draw.random() < 0.1 else str(draw.choice((-2, 0, 1, 3, 40, 4000, 99999))) for _ in range(13)]
        shades = [min(int(draw.paretovariate(0.7)), 20 + k // 10) for _ in range(26)]
        categories = ["" if draw.random() < 0.05 else f"{shade * 2654435761 % 2**32:08x}" for shade in shades]
        rows.append("\t".join([str(int(draw.random() < 0.3 + 0.4 * (shades[0] > 2))), *numbers, *categories]))
    return rows


def timed(rows, seed=3):
    """The rows with a time after each, about ten with the same, in no order; and the times."""
    draw = random.Random(seed)
    times = [draw.randrange(-5, len(rows) // 10) for _ in rows]
    return [f"{row}\t{time}" for row, time in zip(rows, times, strict=True)], times


def book_crossing(folder: Path, readers=40, books=30):
    """Ratings of every third pair, an implicit one among three; titles with commas, books that nobody knows."""
    draw = random.Random(8)
    pairs = [(reader, book) for reader in range(readers) for book in range(books) if draw.random() < 0.4]
    ratings = [f"{reader},{book:010},{draw.choice((0, 5, 8, 10, 10)) if book % 2 else 3}" for reader, book in pairs]
    known = [f'{book:010},"Author, {book // 3}",{1990 + book % 5},Häuser {book % 4}' for book in range(books - 4)]
    pack(folder / "book-crossing" / "ratings.csv.gz", ["user_id,isbn,rating", *ratings])
    pack(folder / "book-crossing" / "books.csv.gz", ["isbn,author,year,publisher", *known])
