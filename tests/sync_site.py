"""Two ends of a transport in two real processes, for tests: adapters of a real size, and a process that can be told what to do.

Run as a script this file is the other process: it reads commands as JSON lines on standard input and answers each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from selfplay.errors import SelfplayError
from selfplay.sync import Bucket, make_receiver, make_sender, pack, unpack, verify
from selfplay.wire.messages import BucketHeader

BOUND_S = 60.0
"""No call below may take longer, whatever its peer does; the calls' own timeouts are much shorter."""
WIDTHS = {"q_proj": (576, 576), "k_proj": (576, 192), "v_proj": (576, 192), "o_proj": (576, 576), "gate_proj": (576, 1536), "up_proj": (576, 1536), "down_proj": (1536, 576)}  # fmt: skip
CONFIG: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": sorted(WIDTHS)}


def adapter(seed: int, layers: int = 30) -> dict[str, torch.Tensor]:
    """An adapter of the size of SmolLM2-135M's at rank 8: 420 tensors, 2.4 million numbers."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for layer in range(layers):
        for name, (into, size) in WIDTHS.items():
            part = "mlp" if name.endswith(("gate_proj", "up_proj", "down_proj")) else "self_attn"
            stem = f"base_model.model.model.layers.{layer}.{part}.{name}"
            out[f"{stem}.lora_A.weight"] = torch.randn(8, into, generator=generator)
            out[f"{stem}.lora_B.weight"] = torch.randn(size, 8, generator=generator)
    return out


def bucket_of(seed: int, dtype: Any, transport: Any, address: str, layers: int = 30) -> Bucket:
    return pack(adapter(seed, layers), dtype=dtype, transport=transport, address=address, adapter_config=CONFIG)


# ── the other process ────────────────────────────────────────────────────────────────────────────


class Peer:
    """What the other process can be told to do; each command is answered by ``ok`` or the error's text."""

    def __init__(self) -> None:
        self.end: Any = None

    def join(self, role: str, transport: Any, address: str, timeout_s: float = 20) -> None:
        if role == "send":
            self.end = make_sender(transport, address=address, world_size=2, timeout_s=timeout_s)
        else:
            self.end = make_receiver(transport, address=address, rank=1, world_size=2, timeout_s=timeout_s)

    def send(self, seed: int, dtype: str, transport: str, address: str, timeout_s: float) -> None:
        self.end.send(bucket_of(seed, dtype, transport, address), timeout_s)

    def receive(self, header: str, timeout_s: float, seed: int) -> None:
        head = msgspec.json.decode(header, type=BucketHeader)
        data = self.end.receive(head, timeout_s)
        verify(head, data)
        for name, tensor in adapter(seed).items():
            found = unpack(head, data)[name]
            assert torch.equal(found, tensor.to(found.dtype)), name

    def announce_and_die(self, header: str) -> None:
        """Dies between its announcement and its broadcast: the receiver is waiting for the bytes by then."""
        head = msgspec.json.decode(header, type=BucketHeader)
        self.end._group.store.set("send/1", f"{head.num_bytes}:{head.crc32:08x}")
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self.end.close()


def main() -> None:
    peer = Peer()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            getattr(peer, name)(**arguments)
            answer = "ok"
        except SelfplayError as e:
            answer = f"{type(e).__name__}: {e}"
        print(json.dumps(answer), flush=True)


class OtherProcess:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")

    def answer(self) -> str:
        assert self.process.stdout is not None
        return str(json.loads(bounded(self.process.stdout.readline)))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


def bounded(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call in a thread and fail if it hangs; returns or raises as the call does."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((call(*args, **kwargs), None))
        except BaseException as e:  # noqa: BLE001  handed to the test's thread
            result.append((None, e))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BOUND_S)
    assert not thread.is_alive(), f"{call} hangs"
    value, error = result[0]
    if error is not None:
        raise error
    return value


def joined(
    other: OtherProcess, role: str, tmp_path: Path, name: str = "rdv", transport: Any = "gloo"
) -> tuple[Any, str]:
    """Our end and the rendezvous, with the other process at the other end in ``role``."""
    address = f"file://{tmp_path / name}"
    other.tell("join", role=role, transport=transport, address=address)
    if role == "send":
        end = bounded(make_receiver, transport, address=address, rank=1, world_size=2, timeout_s=20)
    else:
        end = bounded(make_sender, transport, address=address, world_size=2, timeout_s=20)
    assert other.answer() == "ok"
    return end, address


def encoded(bucket: Bucket) -> str:
    return msgspec.json.encode(bucket.header).decode()


if __name__ == "__main__":
    main()
