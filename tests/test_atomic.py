"""A file is the old one whole or the new one whole, whoever is killed and whatever is full."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_jax._atomic import replacing

ROOT = Path(__file__).parents[1]

# Started without the site packages: the module of writing needs the standard library alone.
WRITER = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("atomic", {str(ROOT / "amp_jax" / "_atomic.py")!r})
atomic = importlib.util.module_from_spec(spec)
spec.loader.exec_module(atomic)
path, version = sys.argv[1], int(sys.argv[2])
print(flush=True)
while True:
    version += 1
    with atomic.replacing(path) as file:
        for _ in range(64):
            file.write(version.to_bytes(8, "little") * 4096)
"""


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def write_new(path: Path, then: Callable[[], None]) -> None:
    with replacing(path) as file:
        file.write(b"new")
        then()


def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path: Path):
    path = tmp_path / "weights"
    version, waits, cut_short = 0, 0.0, 0
    for attempt in range(50):
        writer = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WRITER, str(path), str(version)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()  # it has begun
        waits = (waits + 0.618034) % 1  # spread evenly over 30 ms, so in all parts of a write
        threading.Event().wait(waits * 0.03)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        cut_short += bool(leftovers(tmp_path))
        for name in leftovers(tmp_path):
            (tmp_path / name).unlink()
        if not path.exists():
            assert version == 0
            continue
        content = path.read_bytes()
        found = int.from_bytes(content[:8], "little")
        assert content == found.to_bytes(8, "little") * 4096 * 64, f"attempt {attempt}: neither old nor new"
        assert found >= version
        version = found
    assert version > 0
    assert cut_short > 10  # the kills did fall into writes


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_keeps_the_old_file_and_removes_the_temporary_one(tmp_path: Path, monkeypatch, call):
    path = tmp_path / "weights"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    kept = "could not save .No space left on device.; what was at this path is as it was"
    with pytest.raises(OSError, match=kept) as e:
        write_new(path, full if call == "write" else lambda: None)
    assert e.value.errno == errno.ENOSPC
    assert e.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["weights"]


def test_a_folder_that_can_not_be_synced_is_no_reason_to_say_that_the_old_file_is_there(tmp_path: Path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(b"old")
    synced = []

    def second_fails(handle):
        synced.append(handle)
        if len(synced) == 2:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(OSError, match=r"saved, but .*\(Input/output error\)") as e:
        write_new(path, lambda: None)
    assert e.value.filename == str(tmp_path)
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["weights"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a limit on file sizes")
def test_a_limit_on_the_size_of_files_is_such_an_error_too(tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(b"old")
    script = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)){WRITER}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(path), "0"], capture_output=True, text=True, check=False
    )
    assert "could not save (File too large); what was at this path is as it was" in done.stderr
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["weights"]


def test_any_error_inside_keeps_the_old_file(tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(b"old")
    for error in (KeyboardInterrupt, ValueError):

        def interrupt(error=error):
            raise error

        with pytest.raises(error):
            write_new(path, interrupt)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["weights"]


def test_two_writers_do_not_mix(tmp_path: Path):
    path = tmp_path / "weights"
    both = threading.Barrier(2)

    def write(byte: bytes) -> None:
        both.wait()
        for _ in range(20):
            with replacing(path) as file:
                for _ in range(50):
                    file.write(byte * 1000)

    threads = [threading.Thread(target=write, args=(byte,)) for byte in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in (b"a" * 50_000, b"b" * 50_000)
    assert os.listdir(tmp_path) == ["weights"]


def test_a_link_stays_one_and_permissions_stay(tmp_path: Path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640


def test_a_new_file_has_the_usual_permissions(tmp_path: Path):
    with replacing(tmp_path / "ours") as file:
        file.write(b"")
    (tmp_path / "usual").write_bytes(b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_folder_and_a_missing_folder(tmp_path: Path):
    with pytest.raises(IsADirectoryError, match="this is a folder"), replacing(tmp_path):
        pass
    with pytest.raises(FileNotFoundError, match="could not save"), replacing(tmp_path / "none" / "weights"):
        pass
