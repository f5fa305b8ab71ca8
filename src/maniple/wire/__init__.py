"""The wire protocol: `frames` (framing and sockets), `messages`, `auth` (authentication), `codecs` (compression),
`address` and `tls`."""
