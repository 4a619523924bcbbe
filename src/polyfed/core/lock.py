"""One process at a time in a directory: the second is told which one holds it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from polyfed.core.errors import PolyfedError, RunDirectoryError

NAME = ".lock"


class Lock:
    """Held from `acquire` to `release`, or until the process ends however it ends."""

    def __init__(self, directory: Path, option: str = "--out") -> None:
        self.path = directory / NAME
        self.option = option  # that names the directory
        self.descriptor: int | None = None

    def acquire(self) -> Lock:
        """Take the lock.

        Raises
        ------
        RunDirectoryError
            When another process, or another run of this one, holds it.
        """
        while self.descriptor is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            except OSError as error:
                raise PolyfedError(
                    f"Cannot write {self.path} ({error.strerror}): choose another {self.option}."
                ) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 32).decode(errors="replace").strip() or "another one"
                os.close(descriptor)
                raise RunDirectoryError(
                    f"{self.path.parent} is in use by process {holder}: wait until it ends, or choose another "
                    f"{self.option}."
                ) from None
            if self._is_current(descriptor):
                self.descriptor = descriptor
            else:  # the holder removed the file between our opening and locking it
                os.close(descriptor)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"{os.getpid()}\n".encode(), 0)
        return self

    def release(self) -> None:
        """Give the directory back and leave no trace."""
        if self.descriptor is None:
            return
        with suppress(OSError):
            self.path.unlink()  # while it is still ours, so that nobody else's lock is removed
        os.close(self.descriptor)
        self.descriptor = None

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def __enter__(self) -> Lock:
        return self.acquire()

    def __exit__(self, *details: object) -> None:
        self.release()
