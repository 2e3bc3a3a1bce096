"""The formats in the index of a TensorFlow checkpoint: LevelDB's sorted table, and messages of protocol buffers.

What is wrong in the bytes is a ``ValueError`` that does not yet name the file.
"""

import struct
from collections.abc import Iterator

import google_crc32c

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
"""The last eight bytes of an index."""
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
"""One byte of compression type and the checksum after each block."""
MOST_INDEX_BYTES = 4 << 20
_MOST_TENSORS = 1 << 16
_MOST_NAME_BYTES = 1024


def sorted_table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a sorted table, in order. Raises ``ValueError``."""
    if len(content) < _FOOTER_BYTES or not content.endswith(MAGIC):
        raise ValueError("not the index of a TensorFlow checkpoint (the mark at its end is missing)")
    blocks_end, footer = len(content) - _FOOTER_BYTES, content[-_FOOTER_BYTES:]
    # The footer: where the meta index is and where the index of blocks is, offset and size each.
    position, handles = 0, []
    for _ in range(2):
        offset, position = varint(footer, position)
        size, position = varint(footer, position)
        handles.append((offset, size))
    (meta_offset, meta_size), (index_offset, index_size) = handles
    for _ in _block(content, meta_offset, meta_size, blocks_end):
        pass  # nothing of it is used, but its checksum is compared
    end, last, tensors = 0, None, 0
    for _, handle in _block(content, index_offset, index_size, blocks_end):
        offset, after = varint(handle, 0)
        size, after = varint(handle, after)
        if offset < end:
            raise ValueError(f"the block at byte {offset:,} begins before the end of the one before, {end:,}")
        end = offset + size + _TRAILER_BYTES
        for key, value in _block(content, offset, size, index_offset):
            tensors += 1
            if last is not None and key <= last:
                raise ValueError(f"the key {key!r} stands after {last!r}: expected ascending keys")
            # Blocks are compressed by differences of keys: a small file can hold very many.
            if tensors > _MOST_TENSORS:
                raise ValueError(f"more than {_MOST_TENSORS:,} tensors")
            last = key
            yield key, value


def _block(content: bytes, offset: int, size: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of one block that must end, with its trailer, before ``end``."""
    after = offset + size
    if after + _TRAILER_BYTES > end or size < 4:
        raise ValueError(f"a block at bytes {offset:,} to {after:,}, expected at least four bytes before {end:,}")
    kind, checksum = struct.unpack_from("<BI", content, after)
    # The checksum is over the block and the byte of its type.
    if masked(google_crc32c.value(content[offset : after + 1])) != checksum:
        raise ValueError(f"the block at byte {offset:,} does not have its checksum")
    if kind > 1:
        raise ValueError(f"a block of compression type {kind}: expected 0 (none) or 1 (Snappy)")
    block = _unpacked(content[offset:after]) if kind else content[offset:after]
    # At the end are restart points, for searches, and their number. Before, records: a key is its difference from the
    # last.
    restarts = int.from_bytes(block[-4:], "little")
    if restarts > len(block) // 4 - 1:
        raise ValueError(f"a block of {len(block):,} bytes with {restarts:,} restart points")
    block, position, key, records = block[: len(block) - 4 * (restarts + 1)], 0, b"", 0
    while position < len(block):
        # Of the key before so many bytes stay; then the lengths of what is new in the key, and of the value.
        shared, position = varint(block, position)
        fresh, position = varint(block, position)
        length, position = varint(block, position)
        if shared > len(key) or shared + fresh > _MOST_NAME_BYTES or position + fresh + length > len(block):
            raise ValueError(f"a record of {fresh:,} + {length:,} bytes does not fit the block at byte {offset:,}")
        records += 1
        if records > _MOST_TENSORS:
            raise ValueError(f"a block of more than {_MOST_TENSORS:,} records")
        key = key[:shared] + block[position : position + fresh]
        position += fresh + length
        yield key, block[position - length : position]


def _unpacked(packed: bytes) -> bytes:
    """A block without its Snappy compression (format_description.txt of google/snappy), of at most what an index may have.

    TensorFlow's released versions write no compressed block, but those of the benchmark's checkpoints are.
    """
    length, position = varint(packed, 0)
    if length > MOST_INDEX_BYTES:
        raise ValueError(f"a compressed block of {length:,} bytes, expected at most {MOST_INDEX_BYTES:,}")
    result = bytearray()
    while position < len(packed):
        tag = packed[position]
        kind, count, position = tag & 3, tag >> 2, position + 1  # a literal, or a copy with 1, 2 or 4 bytes of distance
        # How many bytes after the tag belong to it: those of a long literal's length, or of a copy's distance.
        # A literal of up to 60 bytes has its length in the tag; above that the tag says how many bytes hold it.
        extra = (max(0, count - 59), 1, 2, 4)[kind]
        number = int.from_bytes(packed[position : position + extra], "little")
        position += extra
        if kind == 0:
            count = (number if extra else count) + 1
            result += packed[position : position + count]
            position += count
        else:
            # The short form keeps three bits of the distance in the tag, and four to eleven bytes are copied.
            count, distance = (count % 8 + 4, tag >> 5 << 8 | number) if kind == 1 else (count + 1, number)
            if not 0 < distance <= len(result):
                raise ValueError(f"a compressed block that copies from {distance:,} bytes back after {len(result):,}")
            start = len(result) - distance
            piece = result[start : start + count]
            result += (piece * (-(-count // len(piece))))[:count]  # a copy may reach into what it writes
        if position > len(packed) or len(result) > length:
            break
    if position != len(packed) or len(result) != length or length < 4:
        raise ValueError(f"a compressed block that gives {len(result):,} bytes, expected {length:,} and at least 4")
    return bytes(result)


def message_fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a protocol buffer's message. Raises ``ValueError``."""
    position = 0
    while position < len(content):
        tag, position = varint(content, position)
        # Wire types: 0 varint, 1 and 5 of fixed size, 2 with a length.
        kind, length = tag & 7, {1: 8, 5: 4}.get(tag & 7, 0)
        if kind == 0:
            value, position = varint(content, position)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, position = varint(content, position)
        elif kind not in (1, 5):
            raise ValueError(f"a field of wire type {kind}")
        if position + length > len(content):
            raise ValueError(f"a field of {length:,} bytes where {len(content) - position:,} are left")
        value = content[position : position + length]
        position += length
        yield tag >> 3, value if kind == 2 else int.from_bytes(value, "little")


def varint(content: bytes, position: int) -> tuple[int, int]:
    """An unsigned number of up to 64 bits, seven a byte, and the position after it."""
    number = 0
    for index, byte in enumerate(content[position : position + 10]):  # 64 bits take ten bytes
        number |= (byte & 127) << 7 * index
        if byte < 128:
            if number >= 1 << 64:
                break
            return number, position + index + 1
    raise ValueError(f"a number at byte {position:,} that does not end, or is too large")


def integer(value: int | bytes) -> int:
    """The value of a field that is to be a number. Raises ``ValueError``."""
    if isinstance(value, bytes):
        raise ValueError("text where a number is expected")
    return value


def message(value: int | bytes) -> bytes:
    """The value of a field that is to be a message or text. Raises ``ValueError``."""
    if isinstance(value, int):
        raise ValueError("a number where a message is expected")
    return value


def masked(checksum: int) -> int:
    """A CRC-32C as LevelDB stores it: turned by 15 bits, plus a constant."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
