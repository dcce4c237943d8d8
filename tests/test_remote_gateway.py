"""What a remote pool can do to a run by what it sends: nothing but play its own matches. Peers that speak by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from episode_samples import encode
from fake_policy import FakePolicy, serving
from pool_site import GAME, install, make_match
from remote_site import SOURCE, TERMS, Peer, Site, open_site, until
from selfplay.agent import Message, Sampling
from selfplay.environment import JuryQuestion
from selfplay.pool import EpisodeResult
from selfplay.process import RuntimeDir
from selfplay.types import Episode, PolicyVersion, Turn
from selfplay.wire.codec import Codec
from selfplay.wire.messages import (
    PROTOCOL,
    AskPolicy,
    Cancel,
    Choose,
    EpisodeAck,
    EpisodeDone,
    EpisodeFailed,
    Generate,
    PlayMatch,
    PolicyAnswer,
    PoolHello,
    PoolPulse,
    PoolRefused,
    PoolWelcome,
    Refused,
    Retire,
    RunEnds,
    RunPulse,
    ToPolicy,
)

Script = Callable[[Site, FakePolicy], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Script], None]]:
    """Runs a script against an open run without workers of its own, and a policy server."""
    install(tmp_path / "site", monkeypatch)
    runtime = RuntimeDir.create()

    def run(script: Script) -> None:
        async def inside() -> None:
            policy = FakePolicy(runtime.endpoint("policy.sock"))
            async with (
                serving(policy),
                open_site(tmp_path, runtime, engines=(policy.endpoint,), worker=False) as site,
            ):
                await script(site, policy)

        asyncio.run(inside())

    yield run
    runtime.remove()


def question(episode_id: str, request: int = 1, **changes: Any) -> Generate:
    return Generate(
        **{
            "request": request, "episode_id": episode_id, "agent": "agent-a", "pin": "turn", "known_messages": 0,
            "messages": (Message("user", "?"),), "prefix_ids": (), "sampling": TERMS.sampling, "timeout_s": 5.0,
        } | changes
    )  # fmt: skip


async def joined_with_a_match(site: Site, index: int = 0) -> tuple[Peer, str]:
    """A peer that has joined and holds a match."""
    peer = site.peer()
    await peer.join()
    await until(lambda: site.pool.num_free == 4)
    await site.pool.submit(make_match(index, player="llm"))
    return peer, (await peer.next(PlayMatch)).match.episode_id


def test_questions_that_no_match_of_the_pool_needs_are_refused(play: Callable[[Script], None]) -> None:
    jury = JuryQuestion(system="", lead="", prompt="who?", labels=("a", "b"))

    async def script(site: Site, policy: FakePolicy) -> None:
        peer, episode_id = await joined_with_a_match(site)
        asks = {
            "episode 7.0 is not with this pool": question("7.0"),
            "mallory with pin turn does not play": question(episode_id, agent="mallory"),
            "with pin 3 does not play": question(episode_id, pin=3),
            "9 tokens are more than 8": question(episode_id, sampling=Sampling(max_tokens=9)),
        }
        for says, ask in asks.items():
            await peer.send(AskPolicy(message=ask))
            assert says in (await peer.next(PolicyAnswer)).message.message
        await peer.send(AskPolicy(message=question(episode_id, request=2)))
        assert (await peer.next(PolicyAnswer)).message.answer.text.startswith("say ")
        await peer.send(AskPolicy(message=Choose(request=3, agent="base", pin="turn", question=jury, timeout_s=5.0)))
        assert (await peer.next(PolicyAnswer)).message.probabilities == {"a": 0.5, "b": 0.5}
        assert policy.num_generated == 1
        odd = question(episode_id, request=4, sampling=Sampling(max_tokens=8, temperature=0.1))
        await peer.send(AskPolicy(message=odd))  # the fifth fault in a row
        assert "does not sample like this" in (await peer.next(PolicyAnswer)).message.message
        assert "5 faults in a row" in (await peer.next(PoolRefused)).reason
        (result,) = [await site.pool.next_result()]
        assert result.reason == "pool left"  # type: ignore[union-attr]
        await until(lambda: policy.ended == [episode_id])

    play(script)


def test_no_other_message_gets_through_to_the_policy_servers(play: Callable[[Script], None]) -> None:
    async def script(site: Site, policy: FakePolicy) -> None:
        peer, episode_id = await joined_with_a_match(site)
        smuggled = Codec[Any](ToPolicy).encode(Retire(request=1, version=PolicyVersion("agent-a", 0)))
        wrapped = msgspec.msgpack.encode(["ask", msgspec.Raw(smuggled)])
        for frame in (smuggled, wrapped, b"\x80\x04cos\nsystem\n."):
            await peer.send(frame)
        await until(lambda: site.gateway.counts["bad_frames"] == 3)
        await peer.send(AskPolicy(message=Cancel(request=9, target=12345)))  # of nothing: harmless
        await peer.send(AskPolicy(message=question(episode_id)))
        assert (await peer.next(PolicyAnswer)).message.request == 1

    play(script)


def test_an_answer_that_no_model_gave_makes_an_episode_void(play: Callable[[Script], None]) -> None:
    async def script(site: Site, policy: FakePolicy) -> None:
        peer, episode_id = await joined_with_a_match(site)
        await peer.send(AskPolicy(message=question(episode_id)))
        answer = (await peer.next(PolicyAnswer)).message.answer
        true = Turn(
            seat="a", agent="agent-a", round=0, prompt_ids=answer.prompt_ids, sampled_ids=answer.sampled_ids,
            logprobs=answer.logprobs, spans=answer.spans, stop_reason=answer.stop_reason, text=answer.text, move="x",
        )  # fmt: skip
        forgeries = (
            msgspec.structs.replace(true, sampled_ids=(1, 2, 3, 4)),
            msgspec.structs.replace(true, logprobs=(-0.5,) * 4),
            msgspec.structs.replace(true, seat="b", agent="agent-b"),
            Turn(seat="a", agent="agent-a", round=0, text="a move of no model", move="x"),
        )
        for i, turn in enumerate((*forgeries, true)):
            match = make_match(i, player="llm")
            if i:  # each attempt is another match with the same question asked
                await site.pool.submit(match)
                assert (await peer.next(PlayMatch)).match == match
                await peer.send(AskPolicy(message=question(match.episode_id)))
                await peer.next(PolicyAnswer)
            episode = Episode(
                match=match, env_source=SOURCE, turns=(turn,), rewards={"a": 1.0, "b": -1.0}, winners=("a",),
                ended="natural", reason="said",
            )  # fmt: skip
            await peer.send(EpisodeDone(episode_id=match.episode_id, episode=encode(episode)))
            result = await site.pool.next_result()
            await site.pool.ack(match.episode_id)
            assert (await peer.next(EpisodeAck)).episode_id == match.episode_id
            if turn is true:
                assert isinstance(result, EpisodeResult)
            else:
                assert (result.kind, result.reason) == ("infrastructure", "pool fault")  # type: ignore[union-attr]
                assert "is not what agent-" in result.message  # type: ignore[union-attr]

    play(script)


def test_a_pools_word_never_fails_a_match(play: Callable[[Script], None]) -> None:
    """It is void and played elsewhere; and a pool whose games all fail has to go."""

    async def script(site: Site, policy: FakePolicy) -> None:
        peer, _ = await joined_with_a_match(site)
        for i in range(5):
            if i:
                await site.pool.submit(make_match(i, player="llm"))
                await peer.next(PlayMatch)
            kind = "cancelled" if i == 2 else "environment"
            await peer.send(EpisodeFailed(episode_id=f"{i}.0", kind=kind, message="it raised"))  # type: ignore[arg-type]
            result = await site.pool.next_result()
            assert (result.kind, result.reason) == ("infrastructure", "pool fault")  # type: ignore[union-attr]
            assert result.holder_lost  # type: ignore[union-attr]
            await site.pool.ack(f"{i}.0")
        assert "the last: it raised" in (await peer.next(PoolRefused)).reason
        await until(lambda: not site.gateway.names)
        await peer.send(PoolPulse(slots=4))
        assert "not joined" in (await peer.next(PoolRefused)).reason

    play(script)


def test_a_pool_speaks_for_itself_only(play: Callable[[Script], None]) -> None:
    """Not for another pool's matches, not under another's identity, and not before its hello."""

    async def script(site: Site, policy: FakePolicy) -> None:
        peer, episode_id = await joined_with_a_match(site)
        bob = site.peer("bob", identity=b"bob")
        await bob.send(PoolPulse(slots=4))
        assert "not joined" in (await bob.next(PoolRefused)).reason
        await bob.join(slots=1)
        await bob.next(PoolWelcome)
        await bob.send(EpisodeFailed(episode_id=episode_id, kind="infrastructure", message="not mine"))
        await bob.next(EpisodeAck)  # forget it: nobody waits for this
        assert [h.worker for h in site.pool.in_flight] == ["alice-1"]
        assert policy.ended == []
        thief = site.peer("bob", identity=b"peer")  # the name of a peer that is there: never heard
        await thief.send(EpisodeFailed(episode_id=episode_id, kind="infrastructure", message="stolen"))
        peer.close()
        await bob.next(RunPulse)
        again = site.peer("bob", identity=b"peer")  # and when the peer is gone, its name still belongs to its key
        await again.send(EpisodeFailed(episode_id=episode_id, kind="infrastructure", message="stolen"))
        await until(lambda: site.gateway.counts["foreign"] >= 1)
        assert [h.worker for h in site.pool.in_flight] == ["alice-1"]

    play(script)


@pytest.mark.parametrize(
    "hello",
    [
        PoolHello(protocol=PROTOCOL + 1, env=GAME, source=SOURCE, slots=1),
        msgspec.msgpack.encode(["pool", PROTOCOL + 1, {"a": "hello of the future"}]),
    ],
)
def test_another_protocol_is_told_so(play: Callable[[Script], None], hello: Any) -> None:
    async def script(site: Site, policy: FakePolicy) -> None:
        peer = site.peer()
        await peer.send(hello)
        refused = await peer.next(PoolRefused)
        assert refused.protocol == PROTOCOL
        assert f"the run speaks protocol {PROTOCOL}, the pool {PROTOCOL + 1}" in refused.reason

    play(script)


def test_without_keys_nothing_is_heard_and_the_end_of_the_run_is_told(play: Callable[[Script], None]) -> None:
    async def script(site: Site, policy: FakePolicy) -> None:
        context: zmq.Context[Any] = zmq.Context()
        bare, plain = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        plain.setsockopt(zmq.PLAIN_USERNAME, b"alice")
        plain.setsockopt(zmq.PLAIN_PASSWORD, b"secret")
        for socket in (bare, plain):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(site.gateway.address)
            socket.send(msgspec.msgpack.encode(["pool", PROTOCOL, GAME, SOURCE, 1]))
        host, port = site.gateway.address.removeprefix("tcp://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        peer = site.peer()
        await peer.join()
        welcome = await peer.next(PoolWelcome)
        assert (welcome.name, welcome.slots) == ("alice-1", 4)
        assert site.gateway.counts == {"joined": 1}
        writer.close()
        for socket in (bare, plain):
            assert socket.poll(0) == 0
            socket.close()
        context.term()
        await site.gateway.close()
        await peer.next(RunEnds)

    play(script)


def test_the_refusal_of_a_question_tells_nothing_of_the_run(play: Callable[[Script], None]) -> None:
    async def script(site: Site, policy: FakePolicy) -> None:
        peer, episode_id = await joined_with_a_match(site)
        policy.manner = "unavailable"
        await peer.send(AskPolicy(message=question(episode_id)))
        assert (await peer.next(PolicyAnswer)).message == Refused(request=1, kind="unavailable", message="loading")

    play(script)
