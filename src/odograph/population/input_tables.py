"""Columns and tables that callers pass: lists, NumPy, Arrow, pandas, Polars and Parquet.

Values stay in the arrays that they came in: numbers become views of NumPy, and ids of other kinds stay in Arrow.
Objects of any library that exports Arrow's C data interface are read through it. Only a list, or an array of Python
objects, is read item by item. No message has a value: a row is named by its number, counted from 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from odograph.errors import InvalidArgument, load_extra

__all__ = [
    "Column",
    "array_of",
    "arrow_column",
    "arrow_table",
    "check_names",
    "column_of",
    "columns_of",
    "id_bytes",
    "is_arrow",
    "is_column",
    "is_loaded_table",
    "is_table",
    "load_table",
    "parquet_files",
    "read_parquet",
    "repeated_rows",
    "take_rows",
    "write_parquet",
]

Column: TypeAlias = Any  # a NumPy array, or a ChunkedArray of Arrow

_COLUMNS_SHOWN: Final = 8
_UUID_SIZE: Final = 16  # bytes
_HEX: Final = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_UUID_DIGITS: Final = np.array([i for i in range(36) if i not in (8, 13, 18, 23)])  # where a UUID's text has digits


def is_column(asked: object) -> bool:
    """Return whether this is one column: a list, an array, a series."""
    if isinstance(asked, Sequence | np.ndarray):
        return not isinstance(asked, str | bytes | bytearray | memoryview)
    return hasattr(type(asked), "__array__") and not hasattr(type(asked), "columns")


def is_arrow(asked: object) -> bool:
    """Return whether this exports Arrow's C data interface."""
    return hasattr(type(asked), "__arrow_c_stream__") or hasattr(type(asked), "__arrow_c_array__")


def is_table(asked: object) -> bool:
    """Return whether this can be a table: a data frame, an Arrow table, columns by name, a path of Parquet files."""
    if isinstance(asked, str | Path | Mapping):
        return True
    return not is_column(asked) and (hasattr(type(asked), "columns") or is_arrow(asked))


def is_loaded_table(records: object) -> bool:
    """Return whether `take_rows` takes rows of this: a data frame of pandas or Polars, or an Arrow table."""
    kind = type(records)
    return hasattr(kind, "columns") and kind.__module__.partition(".")[0] in {"pandas", "polars", "pyarrow"}


def load_table(table: Any, field: str) -> Any:  # noqa: ANN401  what callers pass
    """Return a table in the form it has, with all its rows in memory; files become an Arrow table."""
    if isinstance(table, str | Path):
        return read_parquet(table, field)
    if hasattr(type(table), "collect_schema") and hasattr(type(table), "collect"):  # a LazyFrame
        return table.collect()
    return table if is_loaded_table(table) else arrow_table(table, field)


def column_of(values: Any, field: str) -> Column:  # noqa: ANN401  what callers pass
    """Return a column: numbers as an array of NumPy, without a copy where possible; what else Arrow has stays there.

    A null is refused with its row.
    """
    pandas = sys.modules.get("pandas")  # if it was never imported, there is no Series
    if pandas is not None and isinstance(values, pandas.Series):
        if isinstance(values.dtype, np.dtype) and values.dtype.kind != "O":
            return values.to_numpy()
        values = _arrow_array(values, field)
    if not is_arrow(values):
        return _numpy_array(values, field)
    return _from_arrow(_arrow_array(values, field), field)


def array_of(values: Any, field: str) -> NDArray[Any]:  # noqa: ANN401  what callers pass
    """Return a column of numbers as an array."""
    found = column_of(values, field)
    if not isinstance(found, np.ndarray):
        raise InvalidArgument(f"{field} must be numbers (got a column of type {found.type})")
    return found


def columns_of(table: Any, names: Sequence[str], field: str = "table") -> dict[str, Column]:  # noqa: ANN401  as above
    """Return some columns of a table, of which no others are read."""
    if isinstance(table, str | Path):
        table = read_parquet(table, field, names)
    elif hasattr(type(table), "collect_schema") and hasattr(type(table), "collect"):  # a LazyFrame
        check_names(table.collect_schema().names(), names, field)
        table = table.select(names).collect()
    pandas = sys.modules.get("pandas")
    if not isinstance(table, Mapping) and not (pandas is not None and isinstance(table, pandas.DataFrame)):
        table = arrow_table(table, field)
    check_names([*(table if isinstance(table, Mapping) else _names_of(table))], names, field)
    found = {name: column_of(table[name], f"the column {name!r} of {field}") for name in names}
    if len({len(column) for column in found.values()}) > 1:
        raise InvalidArgument(f"columns of {field} must have the same length")
    return found


def read_parquet(path: str | Path, field: str, names: Sequence[str] | None = None) -> Any:  # noqa: ANN401  Arrow
    """Return some or all columns of Parquet files as an Arrow table."""
    pa, dataset = load_extra("pyarrow"), load_extra("pyarrow.dataset")
    try:
        found = dataset.dataset(parquet_files(path, field), format="parquet")
        if names is not None:
            check_names(found.schema.names, names, field)
        return found.to_table(columns=None if names is None else [*names])
    except (pa.ArrowException, OSError):  # their messages may contain values
        raise InvalidArgument(f"{field} must be Parquet files with the same columns (got {str(path)!r})") from None


def parquet_files(path: str | Path, field: str) -> list[str]:
    """Return the Parquet files of a path: a file, a folder with such files in it, or a pattern such as day-*.parquet.

    Files and folders whose name begins with a dot or an underscore are left out: other programs put them there.
    """
    where = Path(path)
    if where.is_file():
        return [str(where)]
    if where.is_dir():
        inside = [(one, one.relative_to(where)) for one in sorted(where.rglob("*.parquet"))]
        found = [str(one) for one, own in inside if one.is_file() and not any(part[0] in "._" for part in own.parts)]
    else:
        found = sorted(glob(str(path), recursive=True))  # noqa: PTH207  the pattern may be absolute
    if not found:
        raise InvalidArgument(
            f"{field} must be the path of Parquet files (found none at {str(path)!r}): pass a file, a folder that has"
            " .parquet files in it, or a pattern such as 'prices/*.parquet'"
        )
    return found


def take_rows(records: Any, rows: slice | NDArray[Any]) -> Any:  # noqa: ANN401  a data frame of any library
    """Return rows of a data frame or an Arrow table, by a slice, a mask or an array of their numbers."""
    if isinstance(rows, slice):
        rows = np.arange(*rows.indices(len(records)))
    elif rows.dtype == np.bool_:
        rows = np.flatnonzero(rows)
    if hasattr(type(records), "iloc"):
        return records.iloc[rows].reset_index(drop=True)  # labels would tell how many are left out
    return records.take(rows) if hasattr(type(records), "take") else records[rows]


def repeated_rows(rows: NDArray[Any]) -> tuple[int, int] | None:
    """Return the numbers of two rows with the same value; None if all differ."""
    order = np.argsort(rows, kind="stable")
    same = np.flatnonzero(rows[order[1:]] == rows[order[:-1]])
    return (int(order[same[0]]), int(order[same[0] + 1])) if same.size else None


# Ids in Arrow.


def arrow_column(values: Column, field: str) -> tuple[str, Any]:
    """Return which kind of ids a column has, integer, string or uuid, as int64, large_string or 16 bytes each."""
    pa = load_extra("pyarrow")
    if isinstance(values, np.ndarray) and values.dtype.kind == "T":
        values = values.astype(object)
    found = _arrow_array(values, field)
    _check_no_null(found, field)
    if isinstance(found.type, pa.UuidType) or found.type == pa.binary(_UUID_SIZE):
        return "uuid", found.cast(pa.binary(_UUID_SIZE))
    if pa.types.is_dictionary(found.type):
        found = found.cast(found.type.value_type)
    text = pa.types.is_string(found.type) or pa.types.is_large_string(found.type) or found.type == pa.string_view()
    if not text and not pa.types.is_integer(found.type) and len(found):
        raise InvalidArgument(f"{field} must be integers of 64 bits, strings or UUIDs (got {found.type})")
    try:
        return ("string", found.cast(pa.large_string())) if text else ("integer", found.cast(pa.int64()))
    except pa.ArrowInvalid:
        raise InvalidArgument(f"{field} must be from -2**63 to 2**63 - 1 if they are integers") from None


def _uuid_text(found: Any) -> Any:  # noqa: ANN401  a ChunkedArray of 16 bytes each
    """Return UUIDs as text, in lower case with dashes."""
    pa = load_extra("pyarrow")
    storage = pa.concat_arrays([pa.array([], pa.binary(_UUID_SIZE)), *found.chunks])
    first, last = storage.offset * _UUID_SIZE, (storage.offset + len(storage)) * _UUID_SIZE
    digits = np.frombuffer(storage.buffers()[1] or b"", dtype=np.uint8)[first:last].reshape(-1, _UUID_SIZE)
    text = np.full((len(storage), 36), ord("-"), dtype=np.uint8)
    text[:, _UUID_DIGITS[::2]] = _HEX[digits >> 4]
    text[:, _UUID_DIGITS[1::2]] = _HEX[digits & 15]
    offsets = pa.py_buffer(np.arange(len(storage) + 1, dtype=np.int64) * 36)
    return pa.chunked_array([pa.LargeStringArray.from_buffers(len(storage), offsets, pa.py_buffer(text))])


def id_bytes(kind: str, ids: Any, which: NDArray[Any] | None) -> Iterator[memoryview]:  # noqa: ANN401  a ChunkedArray
    """Yield bytes that are the same for the same ids in any order; with `which`, for the same pairs of both."""
    pa, pc = load_extra("pyarrow"), load_extra("pyarrow.compute")
    rows = pa.table({"id": _sort_key(kind, ids), "which": np.zeros(len(ids), np.int8) if which is None else which})
    if which is None:
        rows = rows.group_by("id").aggregate([("which", "max")]).rename_columns(["id", "which"])
    rows = rows.take(pc.sort_indices(rows, [("id", "ascending"), ("which", "ascending")])).combine_chunks()
    for column in rows.columns:
        for chunk in column.chunks:  # at most one, whose buffers were made by `take`
            yield from (memoryview(buffer) for buffer in chunk.buffers() if buffer is not None)


def write_parquet(columns: Mapping[str, Column], file: BinaryIO) -> None:
    """Write columns as one Parquet file that Spark reads, which knows bytes of any length only."""
    pa = load_extra("pyarrow")
    fixed = pa.binary(_UUID_SIZE)
    plain = {
        name: column.cast(pa.binary()) if getattr(column, "type", None) == fixed else column
        for name, column in columns.items()
    }
    load_extra("pyarrow.parquet").write_table(pa.table(plain), file)


def _sort_key(kind: str, found: Any) -> Any:  # noqa: ANN401  a ChunkedArray of ids
    """Return ids in the form in which equal ids are equal: text that spells a UUID is spelled in one way."""
    pa, pc = load_extra("pyarrow"), load_extra("pyarrow.compute")
    if kind != "string":
        return _uuid_text(found) if kind == "uuid" else found
    digits = pc.replace_substring_regex(pc.utf8_lower(found), "^urn:uuid:|[{}-]", "")
    spelled = pc.replace_substring_regex(digits, "^(.{8})(.{4})(.{4})(.{4})(.{12})$", r"\1-\2-\3-\4-\5")
    chosen = pc.if_else(pc.match_substring_regex(digits, "^[0-9a-f]{32}$"), spelled, found)
    return chosen if isinstance(chosen, pa.ChunkedArray) else pa.chunked_array([chosen])


def _numpy_array(values: Any, field: str) -> NDArray[Any]:  # noqa: ANN401  what callers pass
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, OverflowError):  # NumPy's message may contain values
        raise InvalidArgument(f"{field} must be a list, an array or a series") from None
    # NumPy would make strings of the numbers in a list that also has strings.
    if found.dtype.kind == "U" and not isinstance(values, np.ndarray) and isinstance(values, Sequence):
        wrong = next((i for i, one in enumerate(values) if not isinstance(one, str)), None)
        if wrong is not None:
            raise InvalidArgument(
                f"{field} must all be of one kind (row {wrong} is a {type(values[wrong]).__name__})"
            )
    return found


def _arrow_array(values: Any, field: str) -> Any:  # noqa: ANN401  a ChunkedArray
    pa = load_extra("pyarrow")
    try:
        if isinstance(values, pa.ChunkedArray):
            return values
        if hasattr(values, "__arrow_c_stream__"):
            return pa.chunked_array(values)
        named = hasattr(values, "__arrow_c_array__")
        return pa.chunked_array([pa.array(values) if named else pa.array(values, from_pandas=True)])
    except (pa.ArrowException, TypeError, ValueError, OverflowError):  # their messages may contain values
        raise InvalidArgument(
            f"{field} must be a column of one kind: integers of 64 bits, numbers, strings or UUIDs"
        ) from None


def _check_no_null(found: Any, field: str) -> None:  # noqa: ANN401  a ChunkedArray
    if found.null_count:
        row = int(np.argmax(found.is_null().to_numpy()))
        raise InvalidArgument(
            f"{field} must have no null (row {row}, counted from 0, has one): fill it, or leave the row out"
        )


def _from_arrow(found: Any, field: str) -> Column:  # noqa: ANN401  a ChunkedArray
    pa = load_extra("pyarrow")
    if pa.types.is_null(found.type) and not len(found):
        return np.zeros(0)
    _check_no_null(found, field)
    if not (pa.types.is_integer(found.type) or pa.types.is_floating(found.type) or pa.types.is_boolean(found.type)):
        return found
    if found.num_chunks == 1:
        return found.chunk(0).to_numpy(zero_copy_only=False)  # copies booleans only
    return found.to_numpy()


def arrow_table(table: Any, field: str) -> Any:  # noqa: ANN401  what callers pass
    """Return a table of Arrow, of the same memory where possible."""
    pa = load_extra("pyarrow")
    try:
        return pa.table(table)
    except (pa.ArrowException, TypeError, ValueError):
        raise InvalidArgument(
            f"{field} must be a data frame, an Arrow table or the path of Parquet files (got a"
            f" {type(table).__name__})"
        ) from None


def _names_of(table: Any) -> list[str]:  # noqa: ANN401  a data frame of pandas, or an Arrow table
    return [*getattr(table, "column_names", table.columns)]


def check_names(own: Sequence[str], names: Sequence[str], field: str) -> None:
    """Raise unless a table has some columns, each once."""
    twice = [name for name in names if [*own].count(name) > 1]
    if twice:
        raise InvalidArgument(f"{field} must have the column {twice[0]!r} once: rename the others, or leave them out")
    missing = [name for name in names if name not in own]
    if missing:
        shown = ", ".join(map(repr, own[:_COLUMNS_SHOWN])) + (", ..." if len(own) > _COLUMNS_SHOWN else "")
        raise InvalidArgument(
            f"{field} must have the column {missing[0]!r} (it has {shown or 'none'}): rename one, or pass its name"
        )
