"""Who knows the token may talk: both sides prove it by HMAC-SHA256 over fresh nonces, so that it never travels.

    host    ->  Hello(nonce_h)
    worker  ->  Proof(nonce_w, HMAC(token, "worker" nonce_h nonce_w role id), role, id)
    host    ->  Welcome(HMAC(token, "host" nonce_h nonce_w lineage ...), lineage, ...)

Before its proof a peer may send one frame of at most 512 bytes, within the half-open time.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

from maniple.errors import BadFrame, NotAdmitted
from maniple.wire.messages import Hello, Proof, Refusal, Welcome
from maniple.wire.stream import Stream

HALF_OPEN_S = 5.0
ROLES = ("data", "control", "ask", "feed", "doctor", "watch")
_NONCE_BYTES = 32


def fresh_token() -> str:
    """A random token for a run."""
    return secrets.token_hex(32)


def admit(stream: Stream, token: str, welcome: Callable[[bytes], Welcome]) -> Proof:
    """The host's side: challenge the peer and prove oneself; gives what it said, or raises."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    stream.set_timeout(HALF_OPEN_S)
    stream.send(Hello(nonce))
    proof = stream.receive_message(max_header_bytes=512, deadline=time.monotonic() + HALF_OPEN_S)
    if not isinstance(proof, Proof) or len(proof.nonce) != _NONCE_BYTES or proof.role not in ROLES:
        raise BadFrame("a proof was expected")
    if not hmac.compare_digest(proof.mac, _worker_mac(token, nonce, proof.nonce, proof.role, proof.worker)):
        stream.send(Refusal("NotAdmitted", "the token is not this run's"))
        raise NotAdmitted("a peer does not know the token")
    answer = welcome(b"")
    stream.send(welcome(_host_mac(token, nonce, proof.nonce, answer)))
    return proof


def introduce(stream: Stream, token: str, role: str, worker: str, *, timeout_s: float = HALF_OPEN_S) -> Welcome:
    """The worker's side: prove oneself and check the host; gives its welcome, or raises."""
    deadline = time.monotonic() + timeout_s
    hello = stream.receive_message(deadline=deadline)
    if not isinstance(hello, Hello):
        raise BadFrame("the other side did not say hello")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    stream.send(Proof(nonce, _worker_mac(token, hello.nonce, nonce, role, worker), role, worker))
    answer = stream.receive_message(deadline=deadline)
    if isinstance(answer, Refusal):
        raise NotAdmitted(
            f"the host refuses this worker: {answer.reason}. Take the token from the run's own folder (file `token`)."
        )
    if not isinstance(answer, Welcome):
        raise BadFrame("the other side did not say welcome")
    if not hmac.compare_digest(answer.mac, _host_mac(token, hello.nonce, nonce, answer)):
        raise NotAdmitted("the other side does not know this run's token: it is not the host of this run.")
    return answer


def _worker_mac(token: str, theirs: bytes, ours: bytes, role: str, worker: str) -> bytes:
    return _mac(token, b"worker", theirs, ours, role.encode(), worker.encode())


def _host_mac(token: str, ours: bytes, theirs: bytes, welcome: Welcome) -> bytes:
    said = f"{welcome.lineage} {welcome.restored} {welcome.restored_from!r}"
    return _mac(token, b"host", ours, theirs, said.encode())


def _mac(token: str, *parts: bytes) -> bytes:
    digest = hmac.new(token.encode(), digestmod=hashlib.sha256)
    for part in parts:  # with its length, so that no two lists of parts look the same
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()
