"""The chat API client, player and jury against a real HTTP server on loopback that misbehaves on request."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from selfplay.agent import Decision, Message, PlayerContext, Sampling
from selfplay.environment import JuryQuestion
from selfplay.errors import ConfigError, EngineError
from selfplay.play import ApiJury
from selfplay.play.chat_api import KEY_VARIABLE, ChatApi
from selfplay.types import SeatAssignment
from selfplay_agents.api import APIPlayer

KEY = "sk-canary-0123456789"
QUESTION = JuryQuestion(system="s", prompt="p", lead="It is ", labels=("A", "B"))


class Server:
    """Answers with what ``reply`` makes of the number of the request: (status, body), or None to never answer."""

    def __init__(self, reply: Callable[[int], tuple[int, Any] | None]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append({"path": self.path, "headers": dict(self.headers), "body": body})
                answer = reply(len(outer.requests))
                if answer is None:
                    self.rfile.read(1)  # ends when the client closes
                    outer.hung_up.set()
                    return
                status, content = answer
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


Start = Callable[[Callable[[int], Any]], Server]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    servers: list[Server] = []

    def begin(reply: Callable[[int], Any]) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def says(text: str | None, finish: str = "stop", top: list[tuple[str, float]] | None = None) -> tuple[int, Any]:
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": finish, "index": 0}
    if top is not None:
        choice["logprobs"] = {"content": [{"token": "A", "top_logprobs": [{"token": t, "logprob": p} for t, p in top]}]}
    return 200, {"id": "1", "choices": [choice], "usage": {"total_tokens": 3}}


def api_of(server: Server, **options: Any) -> ChatApi:
    return ChatApi(server.base, "model-x", **({"timeout_s": 10.0, "backoff_s": 0.001} | options))


def complete(api: ChatApi) -> str:
    return asyncio.run(api.complete([Message("user", "hi")], max_tokens=5)).text


def test_one_completion(start: Start) -> None:
    server = start(lambda n: says("hello"))
    assert complete(api_of(server)) == "hello"
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    assert request["headers"]["Authorization"] == f"Bearer {KEY}"
    assert request["body"] == {"model": "model-x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def test_no_key_sends_no_header(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE)
    server = start(lambda n: says(None))
    assert complete(api_of(server)) == ""
    assert "Authorization" not in server.requests[0]["headers"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_troubles_are_tried_again(start: Start, status: int) -> None:
    server = start(lambda n: (status, {"error": "busy"}) if n < 3 else says("at last"))
    assert complete(api_of(server)) == "at last"
    assert len(server.requests) == 3


def test_retries_are_bounded(start: Start) -> None:
    server = start(lambda n: (500, {}))
    with pytest.raises(EngineError, match="failed 3 times, last: HTTP status 500"):
        complete(api_of(server, retries=2))
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 302])
def test_refusals_are_final(start: Start, status: int) -> None:
    server = start(lambda n: (status, {"error": KEY}))
    with pytest.raises(EngineError, match=f"HTTP status {status}") as caught:
        complete(api_of(server))
    assert len(server.requests) == 1
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": 3}}]}', b"[" * 100_000]
)
def test_replies_that_are_none(start: Start, body: bytes) -> None:
    server = start(lambda n: (200, body))
    with pytest.raises(EngineError, match="failed 2 times"):
        complete(api_of(server, retries=1))


def test_a_giant_reply_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfplay.play.chat_api.MAX_REPLY_BYTES", 100)
    server = start(lambda n: says("x" * 1000))
    with pytest.raises(EngineError, match="more than 100 bytes"):
        complete(api_of(server))


def test_a_server_that_never_answers_is_left(start: Start) -> None:
    server = start(lambda n: None)
    with pytest.raises(EngineError, match="failed 2 times, last: TimeoutError"):
        complete(api_of(server, timeout_s=0.1, retries=1))


def test_nobody_listens() -> None:
    with pytest.raises(EngineError, match="ConnectionRefusedError"):
        complete(ChatApi("http://127.0.0.1:9/v1", "m", retries=0))


def test_cancelling_closes_the_connection(start: Start) -> None:
    server = start(lambda n: None)

    async def cancelled() -> None:
        task = asyncio.create_task(api_of(server, timeout_s=60.0).complete([Message("user", "hi")]))
        while not server.requests:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    begun = time.monotonic()
    asyncio.run(cancelled())
    assert server.hung_up.wait(10)
    assert time.monotonic() - begun < 50  # not the request's own timeout


@pytest.mark.parametrize(
    "base", ["", "ftp://x.example/v1", "localhost:8000", "https:", "http:" + "//user:pw@host.example/v1"]
)
def test_addresses_that_are_none(base: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ChatApi(base, "m")
    assert "pw" not in str(caught.value)


# ── player and jury ───────────────────────────────────────────────────────────────────────────────


def player_of(**options: Any) -> APIPlayer:
    assignment = SeatAssignment(seat="a", player="api", agent="api", options=options)
    return APIPlayer(
        PlayerContext(
            assignment=assignment, episode_id="0.0", rng=random.Random(0), policy=None,
            sampling=Sampling(temperature=0.7, top_p=0.9, max_tokens=11), env_id="toy-v0", options=options,
        )
    )  # fmt: skip


def test_the_player_keeps_one_chat(start: Start) -> None:
    server = start(lambda n: says(f"answer {n}", finish="length" if n == 2 else "stop"))
    player = player_of(base=server.base, model="m")
    first = Decision(seat="a", round=0, rules="r", view="v", legal_moves=("x",))
    again = Decision(seat="a", round=0, rules="r", view="v", legal_moves=None, complaint="no")

    async def both() -> list[Any]:
        return [await player.decide(first), await player.decide(again)]

    one, two = asyncio.run(both())
    assert (one.text, one.stop_reason, two.stop_reason, one.sampled_ids) == ("answer 1", "stop", "length", ())
    assert [m["content"] for m in server.requests[1]["body"]["messages"]] == [
        "r",
        "v\nLegal moves: x",
        "answer 1",
        "no",
    ]
    assert server.requests[0]["body"]["temperature"] == 0.7
    assert server.requests[0]["body"]["max_tokens"] == 11


def test_the_player_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SELFPLAY_API_BASE", raising=False)
    with pytest.raises(ConfigError, match="no API address: give option base, or set SELFPLAY_API_BASE"):
        player_of(model="m")
    monkeypatch.setenv("SELFPLAY_API_BASE", "http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="no model name"):
        player_of()
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        player_of(model="m", timeout_s=0)
    with pytest.raises(ConfigError, match="no parameter 'key'"):
        player_of(model="m", key=KEY)


def test_the_jury_reads_the_mass_of_its_labels(start: Start) -> None:
    server = start(lambda n: says("A", top=[("A", -0.5), (" B", -1.5), ("The", -2.0)]))
    answer = asyncio.run(ApiJury(api_of(server)).judge(QUESTION))
    assert sum(answer.values()) == pytest.approx(1.0)
    assert answer["A"] == pytest.approx(1 / (1 + 2.718281828**-1), abs=1e-6)
    body = server.requests[0]["body"]
    assert (body["logprobs"], body["top_logprobs"], body["max_tokens"]) == (True, 20, 1)


@pytest.mark.parametrize("top", [None, [], [("The", -0.1)]])
def test_a_jury_without_mass_on_a_label_gives_no_verdict(start: Start, top: Any) -> None:
    server = start(lambda n: says("I prefer A", top=top))
    with pytest.raises(EngineError, match="gave no probability to any of the labels A, B"):
        asyncio.run(ApiJury(api_of(server)).judge(QUESTION))


def test_the_key_is_in_no_object(start: Start) -> None:
    server = start(lambda n: (500, {}))
    api = api_of(server, retries=0)
    with pytest.raises(EngineError) as caught:
        complete(api)
    assert KEY not in repr(vars(api)) + repr(caught.value) + str(caught.value.__cause__)


@pytest.mark.parametrize("key", ["a\rb", "ключ", "a\x00b"])
def test_a_key_that_cannot_be_sent_is_refused_unseen(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr("selfplay.play.chat_api.os.environ", {"SELFPLAY_API_KEY": key})
    with pytest.raises(ConfigError, match="SELFPLAY_API_KEY holds characters") as caught:
        ChatApi("http://127.0.0.1:9/v1", "m")
    assert key not in str(caught.value)


@pytest.mark.parametrize("base", ["http://127.0.0.1:99999/", "http://host\n/v1", "ftp://host/v1"])
def test_an_address_that_is_none_is_refused(base: str) -> None:
    with pytest.raises(ConfigError, match="API address"):
        ChatApi(base, "m")
