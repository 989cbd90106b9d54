"""64-bit numbers in manifests, read as they are.

The compiled Avro decoder of PyIceberg 0.12 hands them out rounded to 32 bits (apache/iceberg-python#3808).
They are partition values of files: a `replace` writes those of the files beside it again, and readers take
the column from there. So importing this module makes PyIceberg read the eight bytes.
"""

from __future__ import annotations

import struct

from pyiceberg.avro.decoder import BinaryDecoder
from pyiceberg.avro.reader import DoubleReader


def _read_whole(_: DoubleReader, decoder: BinaryDecoder) -> float:
    value: float = struct.unpack("<d", decoder.read(8))[0]
    return value


DoubleReader.read = _read_whole  # type: ignore[assignment, method-assign]
