"""The wire: how two processes talk. `frames` bounds what is read, `messages` says what can be said, `stream` carries
both over a socket, `proof` admits only who knows the token, `codecs` makes values smaller."""

from maniple.wire.address import Address
from maniple.wire.codecs import CODECS, Codec, codec
from maniple.wire.stream import Stream, connect

__all__ = ["CODECS", "Address", "Codec", "Stream", "codec", "connect"]
