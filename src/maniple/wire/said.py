"""What all messages have in common: an array of fields, of which none may be unknown."""

import msgspec


class Said(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One message."""
