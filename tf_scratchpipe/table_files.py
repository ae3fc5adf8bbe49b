"""A table with its optimizer slots in files, written and read a few rows at a time.

A directory holds one `.npy` file for each column (the rows, and each slot that goes with them),
which numpy can open by itself, and `state.json`, which says what must be in them, with a checksum
of each. It is written last, so a directory that has it is whole. Nothing is taken over from files
that have not been checked.
"""

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from tf_scratchpipe.plan import Rows

FORMAT = 1
MANIFEST = "state.json"
CHUNK_BYTES = 2**24
"""Bytes of all columns that are in memory at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """What a table has for each row.

    Args:
        shape: Rows first.
        dtype: Name of the dtype.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize


Columns = Mapping[str, Column]
Reader = Callable[[int, int], Mapping[str, Rows]]
"""Gives rows `start` to `stop` of each column."""


def chunks(columns: Columns) -> Iterator[tuple[int, int]]:
    """Ranges of rows, of so many at a time that they take `CHUNK_BYTES`."""
    rows = next(iter(columns.values())).shape[0]
    size = max(CHUNK_BYTES // max(sum(c.row_bytes for c in columns.values()), 1), 1)
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


def write(
    directory: pathlib.Path,
    columns: Columns,
    read: Reader,
    counters: Mapping[str, Any],
    sync: bool = False,
) -> None:
    """Write a table.

    Args:
        directory: Where; it is there and empty.
        columns: What to write.
        read: Gives the rows.
        counters: Whole numbers and arrays that go with the table.
        sync: Whether to wait until the disk has it.
    """
    arrays = {name: np.asarray(value) for name, value in counters.items() if np.ndim(value)}
    numbers = {name: int(value) for name, value in counters.items() if name not in arrays}
    files = {name: (directory / f"{name}.npy").open("wb") for name in columns}
    sums = dict.fromkeys(columns, 0)
    try:
        for name, column in columns.items():
            _write_header(files[name], column)
        for start, stop in chunks(columns):
            for name, rows in read(start, stop).items():
                data = _bytes(np.ascontiguousarray(rows, columns[name].dtype))
                files[name].write(data)
                sums[name] = zlib.crc32(data, sums[name])
        for file in files.values():
            flush(file, sync)
    finally:
        for file in files.values():
            file.close()
    described = {n: {**dataclasses.asdict(c), "crc32": sums[n]} for n, c in columns.items()}
    manifest = {"format": FORMAT, "columns": described, "counters": numbers}
    manifest["arrays"] = {
        name: _write_array(directory / f"{name}.npy", array, sync) for name, array in arrays.items()
    }
    write_json(directory / MANIFEST, manifest, sync)


class TableFiles:
    """A table that was written.

    Args:
        directory: Where it is.

    Raises:
        ValueError: There is none, or it was written by a later version.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        manifest = read_json(directory / MANIFEST)
        entries = {**manifest["columns"], **manifest.get("arrays", {})}
        self._described = {
            name: Column(tuple(entry["shape"]), entry["dtype"]) for name, entry in entries.items()
        }
        self.columns = {name: self._described[name] for name in manifest["columns"]}
        self._numbers: dict[str, int] = manifest["counters"]
        self._sums = {name: entry["crc32"] for name, entry in entries.items()}

    @property
    def counters(self) -> dict[str, Any]:
        """Whole numbers and arrays that go with the table."""
        names = self._described.keys() - self.columns.keys()
        arrays = {name: self._rows(name, 0, self._described[name].shape[0]) for name in names}
        return {**self._numbers, **arrays}

    def verify(self) -> None:
        """Read everything once.

        Raises:
            ValueError: It is not what was written.
        """
        for name, column in self._described.items():
            path = self._path(name)
            begin = self._begin(name)
            expected = begin + column.shape[0] * column.row_bytes
            if path.stat().st_size != expected:
                raise damaged(path, f"{path.stat().st_size} bytes", f"{expected} bytes")
            found = checksum(path, begin)
            if found != self._sums[name]:
                raise damaged(path, f"checksum {found:08x}", f"checksum {self._sums[name]:08x}")

    def read(self, start: int, stop: int) -> dict[str, Rows]:
        """Rows `start` to `stop` of each column."""
        return {name: self._rows(name, start, stop) for name in self.columns}

    def _rows(self, name: str, start: int, stop: int) -> Rows:
        column = self._described[name]
        with self._path(name).open("rb") as file:
            file.seek(self._begin(name) + start * column.row_bytes)
            data = file.read((stop - start) * column.row_bytes)
        rows: Rows = np.frombuffer(data, column.dtype)
        return rows.reshape(stop - start, *column.shape[1:])

    def _begin(self, name: str) -> int:
        """Where the rows begin, if the file says what the manifest says."""
        path, column = self._path(name), self._described[name]
        try:
            with path.open("rb") as file:
                version = np.lib.format.read_magic(file)
                assert version == (1, 0)
                shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
                begin = file.tell()
        except FileNotFoundError:
            raise damaged(path, "no such file", "the file") from None
        except (ValueError, AssertionError) as error:
            raise damaged(path, f"no numpy file ({error})", "a numpy file") from None
        if shape != column.shape or by_column or dtype.itemsize != np.dtype(column.dtype).itemsize:
            expected = f"{column.dtype} of shape {column.shape}"
            raise damaged(path, f"{dtype} of shape {shape}", expected)
        return begin

    def _path(self, name: str) -> pathlib.Path:
        return self._directory / f"{name}.npy"


# ---- files ------------------------------------------------------------------------------------


def write_json(path: pathlib.Path, value: Any, sync: bool) -> None:
    """Write a JSON file."""
    with path.open("wb") as file:
        file.write(json.dumps(value, indent=1).encode())
        flush(file, sync)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON file that has a format number.

    Raises:
        ValueError: It is not there, not JSON, or of a later format.
    """
    try:
        value = json.loads(path.read_bytes())
        version = value["format"]
    except FileNotFoundError:
        raise damaged(path, "no such file", "the file") from None
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"no JSON of ours ({error})", "a JSON file") from None
    if version != FORMAT:
        raise ValueError(
            f"'{path}' was written by another version. Received: format {version}. Expected: "
            f"format {FORMAT}. Load it with the version that wrote it."
        )
    return dict(value)


def flush(file: BinaryIO, sync: bool) -> None:
    """Hand what was written over to the system, or to the disk."""
    file.flush()
    if sync:
        os.fsync(file.fileno())


def checksum(path: pathlib.Path, begin: int = 0) -> int:
    """Checksum of a file from byte `begin` on."""
    found = 0
    with path.open("rb") as file:
        file.seek(begin)
        while data := file.read(CHUNK_BYTES):
            found = zlib.crc32(data, found)
    return found


def damaged(path: pathlib.Path, received: str, expected: str) -> ValueError:
    """The error for a file that is not what was written."""
    return ValueError(
        f"The saved state is damaged: '{path}'. Received: {received}. Expected: {expected}. "
        "Nothing was loaded; load another copy."
    )


def _write_array(path: pathlib.Path, array: np.ndarray, sync: bool) -> dict[str, Any]:
    """Write an array; returns what the manifest says of it."""
    column, data = Column(array.shape, str(array.dtype)), _bytes(np.ascontiguousarray(array))
    with path.open("wb") as file:
        _write_header(file, column)
        file.write(data)
        flush(file, sync)
    return {**dataclasses.asdict(column), "crc32": zlib.crc32(data)}


def _write_header(file: BinaryIO, column: Column) -> None:
    dtype = np.dtype(column.dtype)
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": column.shape,
    }
    np.lib.format.write_array_header_1_0(file, header)


def _bytes(rows: Rows) -> memoryview:
    """An array's memory; some dtypes do not give theirs away by themselves."""
    return rows.reshape(-1).view(np.uint8).data
