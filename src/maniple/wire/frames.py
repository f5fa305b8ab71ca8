"""Frames: what travels is cut into pieces whose length is known, and bounded, before it is read.

    0   4   magic "mnpl"
    4   1   version of the protocol
    5   1   0
    6   2   bytes of the header       (little-endian, as all numbers)
    8   8   bytes of the payload
    16  ... header: one message of `messages`, as MessagePack
        ... payload: raw bytes, values as they lie in memory

Nothing here runs code of the sender's choice: a header is one of the listed messages with fields of the listed
types, or the frame is refused.
"""

import functools
import struct

import msgspec

from maniple.errors import BadFrame
from maniple.wire.messages import Message

MAGIC = b"mnpl"
VERSION = 1
HEAD = struct.Struct("<4sBBHQ")
MAX_HEADER_BYTES = 0xFFFF

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, payload_bytes: int) -> bytes:
    """The head and the header of a frame."""
    header = _encoder.encode(message)
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes does not fit into a frame")
    return HEAD.pack(MAGIC, VERSION, 0, len(header), payload_bytes) + header


def decode_head(head: bytes | memoryview, *, max_payload_bytes: int) -> tuple[int, int]:
    """The lengths of header and payload."""
    magic, version, zero, header_bytes, payload_bytes = HEAD.unpack(head)
    if magic != MAGIC or zero != 0:
        raise BadFrame(f"{bytes(head[:4])!r} does not begin a frame of maniple. Is another service on this port?")
    if version != VERSION:
        raise BadFrame(
            f"the other side speaks version {version} of the protocol, this one {VERSION}. "
            "Install the same maniple on both."
        )
    if payload_bytes > max_payload_bytes:
        raise BadFrame(f"a payload of {payload_bytes} bytes is announced, where at most {max_payload_bytes} may come.")
    return header_bytes, payload_bytes


def decode_header(header: bytes | memoryview) -> Message:
    """The message in a header."""
    try:
        return _decoder().decode(header)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"the header is no message of this protocol: {error}") from None


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(Message)  # made at the first use: it takes its time to learn all messages
