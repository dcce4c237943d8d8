"""CURVE on ZeroMQ: key files, a listener that lets only listed keys in, and a connection that can say why it was refused.

    STEM.key           public key; given to the other side
    STEM.key_secret    both keys, mode 0600; stays where it was made

In: key files (the format of ``zmq.auth``) and an address. Out: sockets on which every message carries the key it came
from, and on the connecting side one sentence for whatever keeps it out.
"""

from __future__ import annotations

import os
import secrets
import stat
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from selfplay.errors import ConfigError
from selfplay.wire.aio import AsyncSocket
from selfplay.wire.sockets import bind, configured

PUBLIC, SECRET = ".key", ".key_secret"
MAKE_KEYS = "selfplay pool keys NAME"
_DOMAIN = "selfplay"
_KEY_CHARS = 40
_Z85 = set(string.digits + string.ascii_letters + ".-:+=^!/*?&<>()[]{}@%$#")
MAX_PORT = 65535
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class KeyPair(msgspec.Struct, frozen=True, kw_only=True):
    """One side's keys, Z85 text as bytes [40]. Never printed: its representation has no secret."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"


def make_keys(stem: Path) -> tuple[Path, Path]:
    """Write a new pair as ``stem.key`` and ``stem.key_secret`` (mode 0600 from its first byte); the two paths.

    Raises `ConfigError` when one of the files exists or cannot be written.
    """
    public, secret = zmq.curve_keypair()
    paths = stem.with_name(stem.name + PUBLIC), stem.with_name(stem.name + SECRET)
    if taken := [p for p in paths if p.exists()]:
        raise ConfigError(f"{taken[0]} exists; a key is never overwritten: take another name or remove it")
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        _write(paths[1], f'public-key = "{public.decode()}"\n    secret-key = "{secret.decode()}"', 0o600)
        _write(paths[0], f'public-key = "{public.decode()}"', 0o644)
    except OSError as e:
        raise ConfigError(f"cannot write the keys {stem}: {e.strerror}") from None
    return paths


def _write(path: Path, keys: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as f:
        f.write(f"metadata\ncurve\n    {keys}\n")


def load_secret(path: Path) -> KeyPair:
    """The pair in a ``.key_secret`` file; raises `ConfigError` when it is none, or when others may read it."""
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{path} holds no secret key; the file to give ends in {SECRET}")
    if path.stat().st_mode & _OTHERS:
        raise ConfigError(f"{path} can be read by others; make it yours alone:  chmod 600 {path}")
    return KeyPair(public=public, secret=secret)


def load_public(path: Path) -> bytes:
    """The public key in a key file; raises `ConfigError` when there is none."""
    return _load(path)[0]


def load_allowed(folder: Path) -> dict[bytes, str]:
    """Public key → name of its file, of every ``.key`` file in ``folder``; raises `ConfigError` for one that is none."""
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix == PUBLIC)
    except OSError as e:
        raise ConfigError(f"cannot read the allowed keys in {folder}: {e.strerror}") from None
    return {load_public(path): path.stem for path in files}


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except OSError as e:
        raise ConfigError(
            f"cannot read the key file {path}: {e.strerror or 'no such file'}; make one with  {MAKE_KEYS}"
        ) from None
    except ValueError:
        raise ConfigError(f"{path} is not a key file; make one with  {MAKE_KEYS}") from None
    for key in (public, secret):
        if key is not None and not (len(key) == _KEY_CHARS and set(key.decode("latin-1")) <= _Z85):
            raise ConfigError(f"{path} holds a key that is none: it must have {_KEY_CHARS} Z85 characters")
    return public, secret


def check_tcp(address: str) -> str:
    """Return ``address`` when it is ``tcp://HOST:PORT`` with a port that exists; raises `ConfigError`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise ConfigError(f"{address!r} is no address: write tcp://HOST:PORT, with a port of 0 to {MAX_PORT}")
    return address


class KeyedRouter(AsyncSocket):
    """A ROUTER behind CURVE: `take` gives ``[identity, data, key]`` with the public key that the message came from."""

    def take(self) -> list[bytes] | None:
        """As `AsyncSocket.take`, with the sender's key; empty when the connection was not authenticated."""
        try:
            identity = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        data, key, num_parts = b"", b"", 1
        while self._socket.getsockopt(zmq.RCVMORE):
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            num_parts += 1
            data = frame.bytes if num_parts == 2 else b""
            key = _sender(frame)
        self._look_soon()
        return [identity, data, key]


def _sender(frame: zmq.Frame) -> bytes:
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:  # no such property: nobody vouched for this connection
        return b""


class KeyedListener:
    """A bound `KeyedRouter` and the thread that decides who may connect.

    ``allowed`` is asked at every handshake with the client's public key, in another thread.
    """

    def __init__(self, address: str, keys: KeyPair, allowed: Callable[[bytes], bool]) -> None:
        check_tcp(address)
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = ThreadAuthenticator(self._context)
        self._gate.start()
        self._gate.configure_curve_callback(domain=_DOMAIN, credentials_provider=_Provider(allowed))
        try:
            socket = configured(self._context, zmq.ROUTER)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
            bind(socket, address, has_curve_keys=True)
        except BaseException:
            self._end()
            raise
        self.socket = KeyedRouter(socket)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket and end the thread; messages under way get ``linger_ms``."""
        self.socket.close(linger_ms)
        self._end()

    def _end(self) -> None:
        self._gate.stop()
        self._context.term()


class _Provider:
    """What ``zmq.auth`` asks."""

    def __init__(self, allowed: Callable[[bytes], bool]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with this Z85 key may connect to a socket of ``domain``."""
        return domain == _DOMAIN and self._allowed(key)


class KeyedConnection:
    """A DEALER that connects with CURVE keys and knows how far it came."""

    def __init__(self, context: zmq.Context[Any], address: str, identity: bytes, keys: KeyPair, server: bytes) -> None:
        check_tcp(address)
        socket = configured(context, zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
        self._address, self._public = address, keys.public.decode()
        endpoint = f"inproc://handshake-{secrets.token_hex(8)}"
        socket.monitor(endpoint, zmq.EVENT_ALL)
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(endpoint)
        try:
            socket.connect(address)
        except zmq.ZMQError as e:
            self._monitor.close()
            socket.close()
            raise ConfigError(f"cannot connect to {address}: {e.strerror}; write tcp://HOST:PORT") from None
        self.socket = AsyncSocket(socket)
        self._raw = socket
        self.refused = ""
        """Why there will never be a connection, once that is known."""
        self._seen = zmq.Event(0)

    def look(self) -> None:
        """Take notice of what has happened to the connection since the last call."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.refused = (
                    f"{self._address} does not know this pool's key {self._public}: its .key file must be among the run's "
                    "allowed keys (remote.allow)"
                )
            self._seen |= zmq.Event(event)

    def why_silent(self) -> str:
        """One sentence about a connection on which nothing came."""
        self.look()
        if self.refused:
            return self.refused
        if self._seen & zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return f"{self._address} took the connection but does not answer: is it a run's remote.listen?"
        if self._seen & zmq.EVENT_CONNECTED:
            return f"{self._address} ends every handshake: it is no run, or the key given with --server is not its own"
        return f"nobody listens at {self._address}"

    def close(self) -> None:
        """Give what was sent last a second, then close; idempotent."""
        if self.socket.closed:
            return
        self._raw.disable_monitor()
        self._monitor.close()
        self.socket.close(1000)
