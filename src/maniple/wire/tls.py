"""TLS over a socket that one thread may read while another writes.

An `ssl.SSLSocket` must not be used by two threads at once. So the encryption works on memory, under a lock, and
the socket is read and written outside of it.
"""

import contextlib
import datetime
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any, cast

from maniple.errors import InvalidArgument
from maniple.record.folder import write_whole

_PIECE_BYTES = 1 << 18


class TlsPipe:
    """An encrypted connection, with the calls of a socket that a stream needs."""

    def __init__(self, link: socket.socket, context: ssl.SSLContext, *, is_host: bool, timeout_s: float) -> None:
        self._link = link
        self._encrypted, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._encrypted, self._outgoing, server_side=is_host)
        self._lock = threading.Lock()  # of the two BIOs and the state between them
        self._turn = threading.Lock()  # records leave in the order in which they were made
        deadline = time.monotonic() + timeout_s
        while True:
            link.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._feed()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()  # the alert that tells the other side why
                raise
        self._flush()
        link.settimeout(None)

    def sendmsg(self, buffers: list[Any], /) -> int:
        """Encrypt and send a piece of `buffers`; gives its size."""
        piece = buffers[0][:_PIECE_BYTES]
        with self._turn:
            with self._lock:
                sent = self._tls.write(piece)
                data = self._outgoing.read()
            self._link.sendall(data)
        return sent

    def recv_into(self, buffer: memoryview, size: int, flags: int, /) -> int:
        """Receive and decrypt at least a byte; 0 at the end."""
        del flags
        while True:
            with self._lock:
                try:
                    return cast(int, self._tls.read(min(size, buffer.nbytes), buffer))
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0
                has_answer = self._outgoing.pending > 0
            if has_answer:
                self._flush()
            if not self._feed():
                return 0

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._link.fileno()

    def setsockopt(self, level: int, name: int, value: Any, /) -> None:
        """Set an option of the socket."""
        self._link.setsockopt(level, name, value)

    def shutdown(self, how: int, /) -> None:
        """End the connection."""
        self._link.shutdown(how)

    def close(self) -> None:
        """Let the socket go."""
        self._link.close()

    def _feed(self) -> int:
        data = self._link.recv(_PIECE_BYTES)
        with self._lock:
            if data:
                self._encrypted.write(data)
            else:
                self._encrypted.write_eof()
        return len(data)

    def _flush(self) -> None:
        with self._turn:
            with self._lock:
                data = self._outgoing.read()
            if data:
                self._link.sendall(data)


def host_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What a host needs to encrypt."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(
            f"the certificate {certificate} with key {key} cannot be used: {error}. "
            "Give two PEM files that belong together, or leave them out to have them made."
        ) from None
    return context


def worker_context(trusted: Path) -> ssl.SSLContext:
    """What a worker needs: it trusts the host whose certificate (or whose authority's) is in `trusted`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate itself is known, and hosts of a cluster have many names
    try:
        context.load_verify_locations(trusted)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(
            f"the host's certificate {trusted} cannot be read: {error}. Copy `certificate.pem` from the run folder."
        ) from None
    return context


def make_certificate(certificate: Path, key: Path) -> None:
    """Write a certificate of our own making, and its key, readable by its owner alone."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise InvalidArgument(
            "--tls makes a certificate with the package `cryptography`, which is not installed. "
            "`pip install 'maniple[tls]'`, or give --certificate and --key."
        ) from None
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "maniple host")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of a cluster differ
        .not_valid_after(now + datetime.timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(secret, hashes.SHA256())
    )
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    write_whole(certificate, made.public_bytes(serialization.Encoding.PEM), mode=0o644)
    write_whole(key, secret.private_bytes(serialization.Encoding.PEM, *plain), mode=0o600)
