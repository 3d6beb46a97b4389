"""Files that are whole or not there; errors of the file system, and what to do about them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

# What says that the disk, or what is allowed on it, has come to an end.
FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
FAULTS += (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place at the end; removed on errors.

    It is on disk before the name says that it is.
    """
    partial = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        yield partial
        with open(partial, 'rb') as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def advice(error: BaseException) -> str:
    """Why a file operation failed and what to do, from the error or what caused it."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    cause = short(next((e for e in chain if isinstance(e, OSError)), error))
    numbers = {e.errno for e in chain if isinstance(e, OSError)}
    text = ' '.join(map(str, chain))

    def is_any(*names: str) -> bool:
        codes = [getattr(errno, name) for name in names]
        return bool(numbers & set(codes)) or any(os.strerror(code) in text for code in codes)

    after = 'what was saved before is whole, and the same command goes on from there'
    if is_any('ENOSPC', 'EDQUOT'):
        return f'no space is left on the disk. Free some; {after}'
    if is_any('EFBIG'):
        return f'a file would grow beyond what is allowed here (ulimit -f). Raise it; {after}'
    if is_any('EACCES', 'EPERM', 'EROFS'):
        return f'the folder is not writable ({cause}). Allow writing; {after}'
    return f'{cause}. When that is mended, {after}'


def short(error: BaseException) -> str:
    """An error in one line: its type, and the first line of what it says."""
    return (
        f'{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ""}'
    )
