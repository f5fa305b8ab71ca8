"""TLS over a socket that one thread reads while another writes.

`ssl.SSLSocket` is not safe for that. Here OpenSSL works on memory buffers under a lock, and the socket is read and
written outside of the lock.
"""

import contextlib
import datetime
import socket
import ssl
import threading
from pathlib import Path
from typing import Any, cast

from maniple.clock import Deadline
from maniple.errors import InvalidArgument
from maniple.record.folder import write_whole

_CHUNK_BYTES = 1 << 18  # encrypted at once: 16 TLS records


class TlsSocket:
    """An encrypted connection with the methods of `frames.SocketLike`."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, is_host: bool, timeout_s: float) -> None:
        self._socket = connection
        self._encrypted, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._encrypted, self._outgoing, server_side=is_host)
        self._lock = threading.Lock()  # for the BIOs and the TLS state
        self._send_lock = threading.Lock()  # records must leave in the order of their encryption
        self._unsent = memoryview(b"")  # encrypted, and not accepted by the socket yet
        self._taken = 0  # bytes that the last `sendmsg` has encrypted, if it has not sent all of them
        deadline = Deadline(timeout_s, slice_s=timeout_s)
        while True:
            connection.settimeout(deadline.left_s())
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._feed()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()  # sends the alert with the reason
                raise
        self._flush()
        connection.settimeout(None)

    def sendmsg(self, buffers: list[Any], /) -> int:
        """Encrypt and send the beginning of `buffers`; return how many bytes were sent.

        After BlockingIOError, call it with the same buffers again: what was encrypted already is sent first.
        """
        with self._send_lock:
            if not self._taken:
                with self._lock:
                    self._taken = self._tls.write(buffers[0][:_CHUNK_BYTES])
            self._send_encrypted()
            sent, self._taken = self._taken, 0
        return sent

    def recv_into(self, buffer: memoryview, size: int, flags: int, /) -> int:
        """Receive and decrypt at least one byte; return 0 at the end."""
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
        return self._socket.fileno()

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        return self._socket.getsockopt(level, name, size)

    def setsockopt(self, level: int, name: int, value: Any, /) -> None:
        self._socket.setsockopt(level, name, value)

    def shutdown(self, how: int, /) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def _feed(self) -> int:
        data = self._socket.recv(_CHUNK_BYTES)
        with self._lock:
            if data:
                self._encrypted.write(data)
            else:
                self._encrypted.write_eof()
        return len(data)

    def _flush(self) -> None:
        with self._send_lock:
            self._send_encrypted()

    def _send_encrypted(self) -> None:
        """Send all that is encrypted, in order; the caller holds `_send_lock`."""
        while True:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            with self._lock:
                data = self._outgoing.read()
            if not data:
                return
            self._unsent = memoryview(data)


def host_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS context of a host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(
            f"the certificate {certificate} with key {key} cannot be used: {error}. "
            "Give two PEM files that belong together, or omit both options to have them created."
        ) from None
    return context


def worker_context(trusted: Path) -> ssl.SSLContext:
    """Return the TLS context of a worker that trusts the certificate, or the certificate authority, in `trusted`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate itself is pinned, and machines of a cluster have many names
    try:
        context.load_verify_locations(trusted)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(
            f"the host's certificate {trusted} cannot be read: {error}. Copy `certificate.pem` from the run folder."
        ) from None
    return context


def make_certificate(certificate: Path, key: Path) -> None:
    """Write a self-signed certificate and its key; only the owner may read the key."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise InvalidArgument(
            "--tls creates a certificate with the package `cryptography`, which is not installed. "
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
