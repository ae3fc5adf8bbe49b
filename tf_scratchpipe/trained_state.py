"""All that training changes of a table, read and overwritten a few rows at a time.

The same as `Engine.state` and `Engine.load_state` without a copy of the whole.
"""

import contextlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_scratchpipe import table_files
from tf_scratchpipe.engine import SLOT_KEY, Engine
from tf_scratchpipe.pinned import PinnedTable
from tf_scratchpipe.plan import Rows
from tf_scratchpipe.table_files import Column, Columns, Reader, TableFiles, chunks


class TrainedState:
    """The state of a table.

    Args:
        engine: The table.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rows = engine.rows

    @property
    def names(self) -> list[str]:
        """The columns that are trained: rows, and optimizer slots."""
        return ["table", *(SLOT_KEY + name for name in self._rows.slot_names)]

    def columns(self) -> dict[str, Column]:
        """What there is for each row, with slots that no optimizer has taken up yet."""
        columns = self._own_columns()
        for name, values in self._rows.loaded_slots.items():
            columns.setdefault(SLOT_KEY + name, Column(values.shape, str(values.dtype)))
        return columns

    def _own_columns(self) -> dict[str, Column]:
        return {
            name: Column(tuple(host.shape), str(host.dtype))
            for name, host in zip(self.names, self._rows.host, strict=True)
        }

    def column(self, name: str) -> Rows:
        """A copy of a whole column, as trained so far."""
        if name in self.names:
            return self._engine.get(self.names.index(name))
        return self._rows.loaded_slots[name.removeprefix(SLOT_KEY)].copy()

    def read(self, start: int, stop: int) -> dict[str, Rows]:
        """Rows `start` to `stop` of all columns, as trained so far."""
        if isinstance(self._rows, PinnedTable):
            rows = self._rows.get_rows(start, stop)
        else:
            rows = self._engine.group.get_rows(self._engine.table, start, stop)
        loaded = {SLOT_KEY + n: v[start:stop] for n, v in self._rows.loaded_slots.items()}
        return {**loaded, **dict(zip(self.names, rows, strict=True))}

    # ---- files --------------------------------------------------------------------------------

    def save(self, directory: pathlib.Path, sync: bool = False) -> None:
        """Write everything to a directory that is empty.

        Args:
            directory: The directory.
            sync: Whether to wait until the disk has it.
        """
        table_files.write(directory, self.columns(), self.read, self._engine.counters(), sync)

    def load(self, directory: pathlib.Path) -> None:
        """Take over what `save` wrote.

        Raises:
            ValueError: It is damaged or does not fit. Nothing has changed.
        """
        files = TableFiles(directory)
        self.check(files.columns)
        files.verify()
        self.overwrite(files.columns, files.read, files.counters)

    # ---- taking over --------------------------------------------------------------------------

    def check(self, columns: Columns, exactly: bool = False) -> bool:
        """Whether the optimizer slots among these columns are those of the optimizer.

        Args:
            columns: What there is to be loaded.
            exactly: If they are not, that is an error, unless the optimizer is not known yet.

        Raises:
            ValueError: A column has another shape or dtype than this table's.
        """
        own, name = self._own_columns(), self._rows.name
        if "table" not in columns:
            raise ValueError(
                f"There is no table saved for layer '{name}'. Received: {sorted(columns)}"
            )
        saved = {key for key in columns if key.startswith(SLOT_KEY)}
        fitting = self._rows.binding is not None and saved == set(own) - {"table"}
        for key, column in columns.items():
            expected = own[key] if fitting or key == "table" else column
            if column != expected or column.shape[:1] != own["table"].shape[:1]:
                raise ValueError(
                    f"The table of layer '{name}' has shape {own['table'].shape}, and its "
                    f"'{key}' is {expected.dtype} of shape {expected.shape}. Received: the saved "
                    f"'{key}', {column.dtype} of shape {column.shape}"
                )
        if exactly and self._rows.binding is not None and not fitting:
            raise ValueError(
                f"The saved state of layer '{name}' was trained by another row optimizer. "
                f"Received: {sorted(saved)}. Expected: {sorted(set(own) - {'table'})}. Make the "
                "layer and compile the model with the optimizer that they were trained with."
            )
        return fitting

    def overwrite(self, columns: Columns, read: Reader, counters: Mapping[str, Any]) -> None:
        """Take a state over.

        Optimizer slots of another optimizer wait until one is bound that has them.

        Args:
            columns: What there is.
            read: Gives some rows of it.
            counters: Numbers and arrays that go with it.

        Raises:
            ValueError: It does not fit. Nothing has changed.
        """
        fitting = self.check(columns)
        taken = self.names if fitting else self.names[:1]
        waiting = {
            name: np.empty(column.shape, column.dtype)
            for name, column in columns.items()
            if name not in taken
        }
        with self._locked(), tf.init_scope():
            self._blank(len(taken))
            for start, stop in chunks(columns):
                rows = read(start, stop)
                self._set_rows(start, [rows[name] for name in taken])
                for name, whole in waiting.items():
                    whole[start:stop] = rows[name]
        if not fitting:
            self._rows.load_slots({n.removeprefix(SLOT_KEY): v for n, v in waiting.items()})
        self._engine.load_counters(counters)

    def _locked(self) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self._rows, PinnedTable):
            return contextlib.nullcontext()
        return self._engine.group.lock

    def _blank(self, count: int) -> None:
        """The first `count` columns will be overwritten, so no row of them needs to be drawn."""
        if isinstance(self._rows, PinnedTable) and self._rows.filled:
            return
        for host in self._rows.host[:count]:
            host.blank()

    def _set_rows(self, start: int, rows: list[Rows]) -> None:
        if isinstance(self._rows, PinnedTable):
            self._rows.set_rows(start, rows)
        else:
            self._engine.group.set_rows(self._engine.table, start, rows)
