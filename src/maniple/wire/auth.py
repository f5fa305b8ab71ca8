"""Authentication: both sides prove that they know the run's token, by HMAC-SHA256 over fresh nonces.

    host    ->  AuthChallenge(nonce_h)
    worker  ->  AuthResponse(nonce_w, HMAC(token, "worker" nonce_h nonce_w role name), role, name)
    host    ->  Welcome(HMAC(token, "host" nonce_h nonce_w lineage ...), lineage, ...)

The token itself is never sent. Until it is authenticated, a client may send one frame of at most 512 bytes.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable

from maniple.clock import Deadline
from maniple.errors import BadFrame, NotAdmitted
from maniple.wire.frames import Stream
from maniple.wire.messages import AuthChallenge, AuthResponse, Refusal, Welcome

AUTH_TIMEOUT_S = 5.0  # ample for two round trips; a silent client must not occupy a connection for long
ROLES = ("data", "control", "ask", "feed", "peers", "doctor", "watch")
_NONCE_BYTES = 32  # as long as the digest
_MAX_RESPONSE_BYTES = 512


def authenticate(stream: Stream, token: str, role: str, worker: str, *, timeout_s: float = AUTH_TIMEOUT_S) -> Welcome:
    """Authenticate this worker to the host and the host to this worker; return the host's welcome.

    Raises:
        NotAdmitted: the token of one side is not that of the other.
        BadFrame: the other side does not speak this protocol.
    """
    deadline = Deadline(timeout_s, slice_s=timeout_s)
    challenge = stream.receive_message(deadline=deadline)
    if not isinstance(challenge, AuthChallenge):
        raise BadFrame(f"{type(challenge).__name__} came instead of an authentication challenge.")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    mac = _worker_mac(token, challenge.nonce, nonce, role, worker)
    stream.send(AuthResponse(nonce, mac, role, worker))
    welcome = stream.receive_message(deadline=deadline)
    if isinstance(welcome, Refusal):
        raise NotAdmitted(
            f"the host refuses this worker: {welcome.reason}. Take the token from the run's own folder (file `token`)."
        )
    if not isinstance(welcome, Welcome):
        raise BadFrame(f"{type(welcome).__name__} came instead of a welcome.")
    if not hmac.compare_digest(welcome.mac, _host_mac(token, challenge.nonce, nonce, welcome)):
        raise NotAdmitted("the other side does not know this run's token: it is not the host of this run.")
    return welcome


def authenticate_client(stream: Stream, token: str, welcome: Callable[[bytes], Welcome]) -> AuthResponse:
    """Authenticate a client to this host, and the host to it; return the client's response.

    `welcome` makes the host's welcome from its MAC.

    Raises:
        NotAdmitted: the client does not know the token.
        BadFrame: it does not speak this protocol, or asks for an unknown role.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    stream.set_timeout(AUTH_TIMEOUT_S)
    stream.send(AuthChallenge(nonce))
    deadline = Deadline(AUTH_TIMEOUT_S, slice_s=AUTH_TIMEOUT_S)
    response = stream.receive_message(max_header_bytes=_MAX_RESPONSE_BYTES, deadline=deadline)
    if not isinstance(response, AuthResponse) or len(response.nonce) != _NONCE_BYTES or response.role not in ROLES:
        raise BadFrame(f"{type(response).__name__} came instead of a valid authentication response.")
    if not hmac.compare_digest(response.mac, _worker_mac(token, nonce, response.nonce, response.role, response.worker)):
        stream.send(Refusal("NotAdmitted", "the token is not this run's"))
        raise NotAdmitted("a client does not know the token of this run.")
    stream.send(welcome(_host_mac(token, nonce, response.nonce, welcome(b""))))
    return response


def new_token() -> str:
    """Return a random token for a run."""
    return secrets.token_hex(32)


def _worker_mac(token: str, host_nonce: bytes, worker_nonce: bytes, role: str, worker: str) -> bytes:
    return _mac(token, b"worker", host_nonce, worker_nonce, role.encode(), worker.encode())


def _host_mac(token: str, host_nonce: bytes, worker_nonce: bytes, welcome: Welcome) -> bytes:
    content = f"{welcome.lineage} {welcome.restored} {welcome.restored_from!r}"
    return _mac(token, b"host", host_nonce, worker_nonce, content.encode())


def _mac(token: str, *parts: bytes) -> bytes:
    digest = hmac.new(token.encode(), digestmod=hashlib.sha256)
    for part in parts:  # length-prefixed, so that no two lists of parts have the same digest
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()
