"""Key files of remote pools: who may read them, what is no key, and an address on which nothing answers."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq

from selfplay.cli.main import main
from selfplay.errors import ConfigError
from selfplay.wire.curve import KeyedConnection, KeyedListener, load_allowed, load_public, load_secret, make_keys
from selfplay.wire.sockets import check_listen_address


def test_a_secret_key_is_its_owners_alone_and_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stem = tmp_path / "keys" / "alice"
    assert main(["pool", "keys", str(stem)]) == 0
    secret, public = stem.with_name("alice.key_secret"), stem.with_name("alice.key")
    assert capsys.readouterr().out.splitlines()[0].startswith(str(public))
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    pair = load_secret(secret)
    assert load_public(public) == pair.public
    assert zmq.curve_public(pair.secret) == pair.public
    assert pair.secret.decode() not in repr(pair)
    assert pair.secret.decode() not in public.read_text()
    assert main(["pool", "keys", str(stem)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert load_secret(secret) == pair
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match=r"can be read by others.*chmod 600"):
        load_secret(secret)


def test_the_allow_list_is_a_folder_of_public_keys(tmp_path: Path) -> None:
    keys = {load_public(make_keys(tmp_path / name)[0]): name for name in ("alice", "bob")}
    (tmp_path / "README").write_text("not a key")
    assert load_allowed(tmp_path) == keys
    (tmp_path / "broken.key").write_text('public-key = "short"')
    with pytest.raises(ConfigError, match=r"broken\.key holds a key that is none"):
        load_allowed(tmp_path)
    with pytest.raises(ConfigError, match="cannot read the allowed keys"):
        load_allowed(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "says"), [("", "is not a key file"), ('public-key = "%s"' % ("ü" * 40), "holds a key that is none")]
)
def test_what_is_no_key_is_one_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "x.key"
    path.write_text(content, "utf-8")
    with pytest.raises(ConfigError, match=says):
        load_public(path)
    with pytest.raises(ConfigError, match="selfplay pool keys NAME"):
        load_public(tmp_path / "absent.key")


def test_a_foreign_address_is_open_only_with_keys() -> None:
    for address in ("tcp://0.0.0.0:7700", "tcp://*:7700", "tcp://[::]:7700", "tcp://a-host:7700"):
        with pytest.raises(ConfigError, match="without CURVE keys"):
            check_listen_address(address)
        assert check_listen_address(address, has_curve_keys=True) == address


def test_why_a_connection_is_silent(tmp_path: Path) -> None:
    run, alice = (load_secret(make_keys(tmp_path / name)[1]) for name in ("run", "alice"))
    context: zmq.Context[Any] = zmq.Context()

    async def silent(address: str, server: bytes, says: str) -> str:
        link = KeyedConnection(context, address, b"alice", alice, server)
        async with asyncio.timeout(60.0):
            while says not in link.why_silent():
                await asyncio.sleep(0.01)
        link.close()
        return link.refused

    async def look() -> None:
        strict = KeyedListener("tcp://127.0.0.1:0", run, lambda key: False)
        mild = KeyedListener("tcp://127.0.0.1:0", run, lambda key: key == alice.public)
        refused = await silent(strict.socket.address, run.public, "does not know this pool's key")
        assert alice.public.decode() in refused
        assert await silent(mild.socket.address, alice.public, "the key given with --server is not its own") == ""
        assert await silent(mild.socket.address, run.public, "took the connection but does not answer") == ""
        mild.close()
        strict.close()
        assert await silent("tcp://127.0.0.1:9", run.public, "nobody listens at tcp://127.0.0.1:9") == ""

    asyncio.run(look())
    context.term()


@pytest.mark.parametrize(
    "address", ["tcp://nonsense", "tcp://127.0.0.1:99999", "tcp://:7700", "ipc:///x", "tcp://127.0.0.1:7²", ""]
)
def test_an_address_without_host_or_port_is_none(tmp_path: Path, address: str) -> None:
    pair = load_secret(make_keys(tmp_path / "run")[1])
    with pytest.raises(ConfigError, match="write tcp://HOST:PORT"):
        KeyedListener(address, pair, lambda key: True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--connect, --env, --key, --server missing; see  selfplay pool --help"),
        (["--connect", "ipc:///x", "--env", "nim-v0"], "write tcp://HOST:PORT"),
        (["--env", "nmi-v0"], "did you mean 'nim-v0'"),
        (
            ["--key", "run.key"],
            "cannot read the key file run.key: no such file; make one with  selfplay pool keys NAME",
        ),
    ],
)
def test_mistakes_of_the_command_are_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    secret = make_keys(tmp_path / "alice")[1]
    rest = {"--connect": "tcp://127.0.0.1:9", "--env": "nim-v0", "--key": str(secret), "--server": str(secret)}
    if arguments:
        arguments += [p for k, v in rest.items() if k not in arguments for p in (k, v)]
    assert main(["pool", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
