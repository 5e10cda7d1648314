"""What commands read, one item a line, and tables of the same items."""

import sys
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from toolkit.errors import InputError

__all__ = ["pairs_of", "read_lines", "similarity_table"]


def read_lines(file: str) -> list[str]:
    """The lines of a UTF-8 file, or of standard input if it is called "-".

    Raises:
        InputError: it cannot be read.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}") from None
    # only line ends separate texts; str.splitlines would also split at form feeds and Unicode's separators
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def pairs_of(lines: list[str], *, required: bool) -> list[Any]:
    """Lines with one tab become pairs; others stay texts, or are an error if pairs are required.

    Raises:
        InputError: naming the line that is no pair.
    """
    items: list[Any] = [tuple(line.split("\t")) if line.count("\t") == 1 else line for line in lines]
    for number, item in enumerate(items):
        if required and isinstance(item, str):
            raise InputError(f"line {number + 1}: expected two texts with one tab between them")
    return items


def similarity_table(texts: list[str], matrix: list[list[float]], width: int) -> Table:
    """A table of each text's similarity to each, for a console of this width."""
    table = Table(title="cosine similarity", title_justify="left")
    number_column = 9
    table.add_column("text", no_wrap=True, max_width=max(24, width - number_column * len(texts) - 4))
    for number in range(len(texts)):
        table.add_column(str(number), justify="right", no_wrap=True, min_width=6)
    for number, (text, row) in enumerate(zip(texts, matrix, strict=True)):
        table.add_row(escape(f"{number} {text}"), *(f"{value:.3f}" for value in row))
    return table
