"""Map the address of an instruction to its source line with the line table of an ELF file, DWARF 4.

Only the part of the format that clang writes is supported. Source: DWARF Debugging Information Format, version 4,
section 6.2, https://dwarfstd.org/doc/DWARF4.pdf
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """A place in a source file."""

    file: str
    number: int


class _Row(NamedTuple):
    address: int
    file: int
    line: int
    ends: bool


@lru_cache(4096)
def line_at(library: Path, offset: int) -> Line | None:
    """Return the line of the instruction at `offset` from the library's base address; None if it is unknown."""
    try:
        data = _section(library.read_bytes(), b".debug_line")
    except (OSError, struct.error, IndexError):
        return None
    position = 0
    while data is not None and position + 4 <= len(data):
        length = int(struct.unpack_from("<I", data, position)[0])
        found = _search(_Reader(data[: position + 4 + length], position + 4), offset)
        if found:
            return found
        position += 4 + length
    return None


def _section(elf: bytes, name: bytes) -> bytes | None:
    """Return the content of a section of a 64-bit little-endian file, or None."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return None
    table, size, count, names = struct.unpack_from("<Q10xHHH", elf, 40)
    sections = [struct.unpack_from("<II8x8xQQ", elf, table + i * size) for i in range(count)]
    strings = sections[names][2]
    for label, _, start, length in sections:
        if elf[strings + label : strings + label + len(name) + 1] == name + b"\0":
            return elf[start : start + length]
    return None


class _Reader:
    """A sequential reader of bytes."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data, self.position = data, position

    @property
    def more(self) -> bool:
        return self.position < len(self.data)

    def number(self, size: int, *, signed: bool = False) -> int:
        """Read an integer of `size` bytes."""
        self.position += size
        return int.from_bytes(self.data[self.position - size : self.position], "little", signed=signed)

    def leb(self, *, signed: bool = False) -> int:
        """Read a LEB128 integer: seven bits per byte."""
        value = shift = 0
        while True:
            byte = self.number(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value

    def text(self) -> str:
        """Read text up to a zero byte."""
        end = self.data.index(0, self.position)
        self.position, start = end + 1, self.position
        return self.data[start:end].decode(errors="replace")


class _Header(NamedTuple):
    step: int  # bytes of the smallest instruction
    line_base: int
    line_range: int
    lengths: tuple[int, ...]  # operands per standard opcode
    files: tuple[str, ...]


def _search(reader: _Reader, offset: int) -> Line | None:
    if reader.number(2) != 4:
        return None
    header = _header(reader)
    before: _Row | None = None
    known = 0  # the last line that is not 0, which stands for code of no line
    for row in _rows(reader, header):
        if before and not before.ends and before.address <= offset < row.address:
            number = before.line or known
            return Line(header.files[before.file - 1], number) if number else None
        known = row.line or known
        before = row
    return None


def _header(reader: _Reader) -> _Header:
    end = reader.number(4) + reader.position
    step = reader.number(1)
    reader.number(2)  # operations per instruction, and whether rows begin as statements
    line_base, line_range = reader.number(1, signed=True), reader.number(1)
    lengths = tuple(reader.number(1) for _ in range(reader.number(1) - 1))
    while reader.text():  # folders
        pass
    files = []
    while name := reader.text():
        files.append(name)
        for _ in range(3):  # folder, time, size
            reader.leb()
    reader.position = end
    return _Header(step, line_base, line_range, lengths, tuple(files))


def _rows(reader: _Reader, header: _Header) -> Iterator[_Row]:
    """Run the line-number program."""
    address, file, line = 0, 1, 1
    while reader.more:
        code = reader.number(1)
        if code > len(header.lengths):  # special: both registers at once, and a row
            change = code - len(header.lengths) - 1
            address += change // header.line_range * header.step
            line += header.line_base + change % header.line_range
            yield _Row(address, file, line, False)
        elif code == 0:  # extended
            size = reader.leb()
            end = reader.position + size
            match reader.number(1):
                case 1:
                    yield _Row(address, file, line, True)
                    address, file, line = 0, 1, 1
                case 2:
                    address = reader.number(size - 1)
            reader.position = end
        elif code == 1:
            yield _Row(address, file, line, False)
        elif code == 2:
            address += reader.leb() * header.step
        elif code == 3:
            line += reader.leb(signed=True)
        elif code == 4:
            file = reader.leb()
        elif code == 8:
            address += (255 - len(header.lengths) - 1) // header.line_range * header.step
        elif code == 9:
            address += reader.number(2)
        else:
            for _ in range(header.lengths[code - 1]):
                reader.leb()
