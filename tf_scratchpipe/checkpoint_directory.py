"""A directory with the latest checkpoint, which is either wholly there or not at all.

A checkpoint is written into a directory of another name, brought to the disk, and then renamed; the
one before goes after that. Whoever is killed meanwhile leaves the one before.
"""

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

_WHOLE = re.compile(r"checkpoint-(\d+)")
_WRITING = ".writing"
_OLD = ".old"


class CheckpointDirectory:
    """Where checkpoints are kept. One process may write at a time.

    Args:
        path: The directory; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)

    def newest(self) -> pathlib.Path | None:
        """The latest checkpoint, if there is one."""
        numbered = self._numbered()
        return numbered[max(numbered)] if numbered else None

    @contextlib.contextmanager
    def writing(self) -> Iterator[pathlib.Path]:
        """A directory to write a checkpoint into. It counts once the block is left in peace."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.clean()
        number = max(self._numbered(), default=0) + 1
        started = self.path / f"{_WRITING}-{number}"
        started.mkdir()
        try:
            yield started
            for directory, _, _ in os.walk(started):
                _sync(directory)
            started.rename(self.path / f"checkpoint-{number}")
            _sync(self.path)
        except BaseException:
            shutil.rmtree(started, ignore_errors=True)
            raise
        for older, path in self._numbered().items():
            if older < number:
                self._remove(path)

    def clean(self) -> None:
        """Remove what earlier processes have left half written or half removed."""
        for path in (*self.path.glob(f"{_WRITING}-*"), *self.path.glob(f"{_OLD}-*")):
            shutil.rmtree(path)

    def delete(self) -> None:
        """Remove all checkpoints, and the directory if nothing else is in it."""
        for path in self._numbered().values():
            self._remove(path)
        self.clean()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _remove(self, path: pathlib.Path) -> None:
        # Renamed first: what is half removed is no checkpoint.
        shutil.rmtree(path.rename(self.path / f"{_OLD}-{path.name}"))

    def _numbered(self) -> dict[int, pathlib.Path]:
        if not self.path.exists():
            return {}
        matches = ((_WHOLE.fullmatch(path.name), path) for path in self.path.iterdir())
        return {int(match[1]): path for match, path in matches if match}


def _sync(directory: str | pathlib.Path) -> None:
    """Bring a directory's list of names to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
