"""The safetensors format: reading its header with suspicion, its tensors one at a time, and writing them as a stream.

A file is the length of its *header* (8 bytes, little-endian), the header (JSON: name -> dtype, shape and the tensor's
first and last byte), and the tensors back to back. Nothing in it is ever run or unpickled. What the header says is
checked against the size of the file before anything is allocated: no gap, no overlap, no byte too many.

The package `safetensors` has no NumPy dtype for bfloat16 and float8 and reads or writes a file in one go, so the tests
hold this file against it, and it isn't used here. (https://github.com/huggingface/safetensors, "Format")
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, cast

import ml_dtypes
import numpy as np

from amp_jax import _narrowing
from amp_jax._errors import AmpTypeError, AmpValueError

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
"""The format's dtype names. Its float4 and float6, which pack several numbers into a byte, are left out."""

CODES = {dtype: code for code, dtype in DTYPES.items()}
METADATA = "__metadata__"
"""The one name in a header that is no tensor."""

_LONGEST_HEADER = 100_000_000  # the format's own limit
_MOST_AXES = 32


class Spec(NamedTuple):
    """What a header says of a tensor.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        start: Its first byte, counted from the end of the header.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int = 0

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.size * self.dtype.itemsize


class Header(NamedTuple):
    """A file's contents, without its tensors.

    Attributes:
        specs: What each tensor is, by name, in the order of the file.
        metadata: Strings that the writer has put there.
        end: Where in the file the tensors begin.
        where: What errors call the file.
    """

    specs: dict[str, Spec]
    metadata: dict[str, str]
    end: int
    where: str


def read_header(file: BinaryIO, where: str) -> Header:
    """The header of an open file, checked.

    >>> import io
    >>> read_header(io.BytesIO(bytes(7)), "x.safetensors")
    Traceback (most recent call last):
    amp_jax._errors.AmpValueError: x.safetensors is no safetensors file: it has 7 bytes, fewer than the header's length.

    Args:
        file: An open binary file, or a `BytesIO`.
        where: What errors call it.

    Raises:
        AmpValueError: It is no whole, well-formed safetensors file.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    first = file.read(8)
    if len(first) < 8:
        raise _malformed(where, f"it has {size} bytes, fewer than the header's length")
    length = int.from_bytes(first, "little")
    if length > min(size - 8, _LONGEST_HEADER):
        raise _malformed(where, _wrong_length(first, length, size))
    specs, metadata = _parsed(file.read(length), where)
    _check_layout(specs, size - 8 - length, where)
    ordered = dict(sorted(specs.items(), key=lambda item: (item[1].start, item[1].nbytes)))
    return Header(ordered, metadata, 8 + length, where)


def _malformed(where: str, why: str) -> AmpValueError:
    return AmpValueError(f"{where} is no safetensors file: {why}.")


def _wrong_length(first: bytes, length: int, size: int) -> str:
    if first[:1] == b"\x80":
        return "it begins like a pickle, which could run any code and is not opened here"
    if first[:4] == b"PK\x03\x04":
        return "it is a zip archive, such as torch.save and numpy.savez write; it is not opened here"
    if length > _LONGEST_HEADER:
        return f"its header would have {length} bytes, and {_LONGEST_HEADER} is the limit of the format"
    return f"its header would have {length} bytes, but the whole file has {size}; is it cut off"


def _parsed(raw: bytes, where: str) -> tuple[dict[str, Spec], dict[str, str]]:
    try:
        if raw[:1] != b"{":
            raise ValueError("it does not begin with a brace")
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
        "".join(header).encode()  # JSON can spell half of a surrogate pair, which is no text
    except (ValueError, RecursionError) as error:
        raise _malformed(where, f"its header can't be read ({error})") from None
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _malformed(where, f"{METADATA} in its header is no table of strings")
    return {name: _spec(name, entry, where) for name, entry in header.items()}, cast(dict[str, str], metadata)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name[:200]!r} is there twice")
    return table


def _spec(name: str, entry: Any, where: str) -> Spec:
    """One tensor's entry, with every number a Python int that can't overflow."""
    of = f"of its tensor {name[:200]!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _malformed(where, f"the entry {of} lacks dtype, shape or data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise _malformed(where, f"the dtype {of} is {str(code)[:200]!r}; known are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > _MOST_AXES:
        raise _malformed(where, f"the shape {of} is {str(shape)[:200]}, expected at most {_MOST_AXES} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _malformed(where, f"the data_offsets {of} are {str(offsets)[:200]}, expected its first and last byte")
    spec = Spec(DTYPES[code], tuple(shape), offsets[0])
    # An empty tensor may name any size beside its 0, and NumPy computes with them in 64 bits.
    if math.prod(n or 1 for n in shape) * spec.dtype.itemsize >= 1 << 63:
        raise _malformed(where, f"the shape {of} is {str(shape)[:200]}, more than can exist")
    if offsets[1] - offsets[0] != spec.nbytes:
        taken = offsets[1] - offsets[0]
        raise _malformed(where, f"the data {of} has {taken} bytes, and {code}{shape} takes {spec.nbytes}")
    return spec


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in cast(list[Any], numbers))


def _check_layout(specs: Mapping[str, Spec], size: int, where: str) -> None:
    end = 0
    for name, spec in sorted(specs.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if spec.start != end:
            fault = "overlaps the one before" if spec.start < end else "leaves a gap before it"
            raise _malformed(where, f"its tensor {name[:200]!r} begins at byte {spec.start} and {fault}, to {end}")
        end += spec.nbytes
    if end != size:
        raise _malformed(where, f"its tensors take {end} bytes, but {size} follow the header; is it cut off")


def read_chunks(file: BinaryIO, header: Header, name: str) -> Iterator[np.ndarray[Any, Any]]:
    """A tensor's numbers, flat and in order, a few hundred thousand at a time, so that one may be larger than memory.

    Raises:
        AmpValueError: The file has become shorter since its header was read.
    """
    spec = header.specs[name]
    for first in range(0, spec.size, _narrowing.CHUNK):
        count = min(_narrowing.CHUNK, spec.size - first)
        raw = np.empty(count * spec.dtype.itemsize, np.uint8)
        file.seek(header.end + spec.start + first * spec.dtype.itemsize)
        if file.readinto(memoryview(raw)) != raw.nbytes:  # type: ignore[attr-defined]
            raise _malformed(header.where, f"it ended inside of its tensor {name!r}; is it being written to")
        # A byte that is neither 0 nor 1 is no valid bool, and NumPy would trust it.
        yield raw != 0 if spec.dtype == np.bool_ else raw.view(spec.dtype)


def read_tensor(file: BinaryIO, header: Header, name: str) -> np.ndarray[Any, Any]:
    """A tensor, whole. Its memory is no more than what the checked header and the file agree on."""
    spec = header.specs[name]
    whole = np.empty(spec.size, spec.dtype)
    first = 0
    for chunk in read_chunks(file, header, name):
        whole[first : first + chunk.size] = chunk
        first += chunk.size
    return whole.reshape(spec.shape)


def laid_out(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """The tensors with their places: wide dtypes first, so that each lies on a multiple of its own width."""
    placed: dict[str, Spec] = {}
    end = 0
    for name, spec in sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        placed[name] = spec._replace(start=end)
        end += spec.nbytes
    return placed


def header_bytes(placed: Mapping[str, Spec], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file whose tensors lie at these places.

    Raises:
        AmpTypeError: The format has no name for a dtype.
        AmpValueError: The header is larger than the format allows, or a name is no valid text.
    """
    table: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for name, spec in placed.items():
        if spec.dtype not in CODES:
            known = ", ".join(dtype.name for dtype in CODES)
            raise AmpTypeError(f"{name!r} is of {spec.dtype}, which safetensors has no name for; it has {known}.")
        end = spec.start + spec.nbytes
        table[name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [spec.start, end]}
    try:
        raw = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise AmpValueError(f"a name is no valid text: {error.object[error.start - 20 : error.end + 20]!r}") from None
    raw += b" " * (-len(raw) % 8)
    if len(raw) > _LONGEST_HEADER:
        raise AmpValueError(f"the names and shapes take {len(raw)} bytes, and {_LONGEST_HEADER} is the format's limit.")
    return len(raw).to_bytes(8, "little") + raw


def write_chunks(file: BinaryIO, chunks: Iterable[np.ndarray[Any, Any]]) -> None:
    """A tensor's numbers, little-endian, as they come."""
    for chunk in chunks:
        flat = np.ascontiguousarray(chunk).reshape(-1)
        little = flat.astype(flat.dtype.newbyteorder("<"), copy=False)
        file.write(memoryview(little.view(np.uint8)))
