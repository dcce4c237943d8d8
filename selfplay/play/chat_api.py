"""A small client of OpenAI-compatible chat completions, for API players and API juries. Standard library only.

In: messages and sampling fields. Out: one `Choice`. The key is read from the environment variable SELFPLAY_API_KEY when
a request is made; it is stored nowhere and is in no message. Requests have a timeout and bounded retries; cancelling
one closes its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from selfplay.agent import Message
from selfplay.errors import ConfigError, EngineError
from selfplay.play.text import printable
from selfplay.play.threads import in_thread

KEY_VARIABLE = "SELFPLAY_API_KEY"
BASE_VARIABLE = "SELFPLAY_API_BASE"
MAX_REPLY_BYTES = 8 << 20
_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float


class _TokenLogprob(msgspec.Struct, frozen=True):
    top_logprobs: tuple[TopLogprob, ...] = ()


class _Logprobs(msgspec.Struct, frozen=True):
    content: tuple[_TokenLogprob, ...] | None = None


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """What the API answered."""

    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None

    @property
    def text(self) -> str:
        return self.message.content or ""

    def first_top_logprobs(self) -> tuple[TopLogprob, ...]:
        """Alternatives for the first sampled token; empty when the API gave none."""
        content = self.logprobs.content if self.logprobs is not None else None
        return content[0].top_logprobs if content else ()


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[Choice, ...]


class _Retry(Exception):
    """An answer that may be different next time."""


class ChatApi:
    """One endpoint and model. ``base`` is the address up to ``/chat/completions``, for example http://host:8000/v1."""

    def __init__(
        self, base: str, model: str, *, timeout_s: float = 60.0, retries: int = 3, backoff_s: float = 0.5
    ) -> None:
        try:
            url = urlsplit(base)
            port = url.port
        except ValueError as e:
            raise ConfigError(f"API address {base!r} is not valid: {e}") from None
        if url.scheme not in ("http", "https") or not url.hostname or not base.isprintable():
            raise ConfigError(f"API address {base!r} is not of the form https://host/v1")
        if url.username or url.password:
            raise ConfigError(
                f"API address of {url.hostname} contains a user or password; put the key into {KEY_VARIABLE}"
            )
        if not model:
            raise ConfigError(f"no model name was given for the API at {base}")
        api_key()  # a key that cannot be sent is said before anything is played
        self._secure, self._host, self._port = url.scheme == "https", url.hostname, port
        self._path = url.path.rstrip("/") + "/chat/completions"
        self.model = model
        self._timeout_s, self._retries, self._backoff_s = timeout_s, retries, backoff_s

    async def complete(self, messages: Sequence[Message], **fields: object) -> Choice:
        """One chat completion; raises `EngineError` when none can be had."""
        body = {"model": self.model, "messages": [{"role": m.role, "content": m.content} for m in messages], **fields}
        data = msgspec.json.encode(body)
        for attempt in range(self._retries + 1):
            try:
                return _choice(await self._post(data))
            except _Retry as e:
                if attempt == self._retries:
                    raise EngineError(f"API at {self._host} failed {attempt + 1} times, last: {e}") from None
                await asyncio.sleep(self._backoff_s * 2**attempt)
        raise AssertionError("the loop returns or raises")

    async def _post(self, data: bytes) -> bytes:
        exchange = _Exchange(self._connection(), self._path, data)
        try:
            status, reply = await in_thread(exchange.run)
        except (OSError, http.client.HTTPException) as e:
            # What a server said may be anything: one printable line, and not all of it.
            raise _Retry(" ".join(printable(f"{type(e).__name__}: {e}"[:200]).split())) from None
        finally:
            exchange.abort()
        if status in _RETRIED:
            raise _Retry(f"HTTP status {status}")
        if status != 200:
            hint = f"; is {KEY_VARIABLE} set?" if status in (401, 403) else ""
            raise EngineError(f"API at {self._host} refused the request with HTTP status {status}{hint}")
        if len(reply) > MAX_REPLY_BYTES:
            raise EngineError(f"API at {self._host} answered with more than {MAX_REPLY_BYTES} bytes")
        return reply

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)


class _Exchange:
    """One request and its reply, run in a thread; `abort` ends it from another one."""

    def __init__(self, connection: http.client.HTTPConnection, path: str, data: bytes) -> None:
        self._connection, self._path, self._data = connection, path, data
        self._socket: socket.socket | None = None
        self._aborted = False

    def run(self) -> tuple[int, bytes]:
        """(status, reply), of the reply at most one byte over the limit."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := api_key():
            headers["Authorization"] = f"Bearer {key}"
        with contextlib.closing(self._connection) as connection:
            connection.connect()
            self._socket = connection.sock  # a reply that ends with the connection takes it away from there
            if self._aborted:
                raise ConnectionAbortedError("given up while connecting")
            connection.request("POST", self._path, body=self._data, headers=headers)
            with connection.getresponse() as response:
                return response.status, response.read(MAX_REPLY_BYTES + 1)

    def abort(self) -> None:
        """Wake a thread that still waits on the connection; it closes what it opened. Harmless afterwards."""
        self._aborted = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def api_key() -> str:
    """The key from SELFPLAY_API_KEY, or nothing; raises `ConfigError`, which does not show it, when it cannot be one."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{KEY_VARIABLE} holds characters that no key has: line breaks, controls or non-ASCII letters"
        )
    return key


def api_base(given: str) -> str:
    """The address to use: the given one, else the environment variable SELFPLAY_API_BASE; raises `ConfigError`."""
    base = given or os.environ.get(BASE_VARIABLE, "")
    if not base:
        raise ConfigError(f"no API address: give option base, or set {BASE_VARIABLE}")
    return base


def _choice(reply: bytes) -> Choice:
    try:
        completion = msgspec.json.decode(reply, type=_Completion)
    except (msgspec.DecodeError, RecursionError) as e:
        raise _Retry(f"the reply is not a chat completion: {e}") from None
    if not completion.choices:
        raise _Retry("the reply holds no choice")
    return completion.choices[0]
