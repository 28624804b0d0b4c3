"""Writing a file so that whoever looks finds the old one whole or the new one whole, whatever happens in between.

The bytes go to a *temporary file* in the same folder, reach the disk, and only then take the name. The temporary file
of a writer that was killed stays behind as `.NAME.<random>.tmp`; nobody reads it.

Only the standard library is used here, so that a test can kill a hundred writers that never started JAX.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Generator
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """A new file to write to, which replaces the one at `path` once the block ends without an error.

    Two writers don't mix: each has a temporary file of its own, and the last to finish wins.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, replacing(f"{folder}/a") as file:
    ...     _ = file.write(b"whole")

    Args:
        path: Where the file will be. A symbolic link stays one: what it points to is replaced.

    Raises:
        OSError: The file can't be written, for example since the disk is full. What was at `path` is untouched. Or the
            new file is there, but its folder can't be brought to the disk, as the message then says.
    """
    final = os.path.realpath(path)
    folder, name = os.path.split(final)
    if os.path.isdir(final):
        raise IsADirectoryError(errno.EISDIR, "can't save here, this is a folder", str(path))
    # The name is cut, since 255 bytes is all that a file system may allow.
    temporary = os.path.join(folder, f".{name[:60]}.{secrets.token_hex(8)}.tmp")
    try:
        with _created(temporary) as file:
            yield file
            file.flush()
            if os.path.exists(final):
                os.chmod(temporary, os.stat(final).st_mode & 0o7777)
            os.fsync(file.fileno())
        os.replace(temporary, final)
    except OSError as error:
        message = f"could not save ({error.strerror or error}); what was at this path is as it was"
        raise OSError(error.errno or errno.EIO, message, str(path)) from error
    else:
        _sync_folder(folder)
    finally:
        # Gone after the rename; still there after any error, a KeyboardInterrupt included.
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def _created(temporary: str) -> BinaryIO:
    # Not tempfile.mkstemp, whose files only their owner may read.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(temporary, flags, 0o666), "wb", buffering=1 << 20)


def _sync_folder(folder: str) -> None:
    """Without this the rename itself may be lost with the power. Windows can't open folders, nor need it."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
            message = f"saved, but a loss of power may still undo it: can't sync this folder ({error.strerror})"
            raise OSError(error.errno or errno.EIO, message, folder) from error
    finally:
        os.close(handle)
