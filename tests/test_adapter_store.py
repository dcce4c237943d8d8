"""Adapter versions on disk: whole or absent, never changed, and nothing in them that runs code."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfplay.errors import ConfigError, StoreError
from selfplay.store.adapters import AdapterStore
from selfplay.store.peft_format import MAX_HEADER_BYTES, folder_digest
from selfplay.types import PolicyVersion

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
STEM = "base_model.model.model.layers.0.self_attn.q_proj"
SHAPES = {f"{STEM}.lora_A.weight": (2, 4), f"{STEM}.lora_B.weight": (4, 2)}
PRO = [PolicyVersion("pro", n) for n in range(12)]


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def safetensors(shapes: dict[str, tuple[int, ...]], fill: int = 1, **change: Any) -> bytes:
    """A safetensors file by hand, so that it can be wrong in any way."""
    header: dict[str, Any] = {}
    edge = 0
    for name, shape in shapes.items():
        size = 4
        for d in shape:
            size *= d
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [edge, edge + size]}
        edge += size
    for name, fields in change.items():
        header[f"{STEM}.{name}.weight"].update(fields)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes([fill]) * edge


def writer(
    weights: bytes | None = None, config: dict[str, Any] | bytes = CONFIG, **extra: bytes
) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(safetensors(SHAPES) if weights is None else weights)
        text = config if isinstance(config, bytes) else json.dumps(config).encode()
        (folder / "adapter_config.json").write_bytes(text)
        for name, data in extra.items():
            (folder / name.replace("__", ".")).write_bytes(data)

    return write


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "adapters")


def test_publish_and_read_back(store: AdapterStore) -> None:
    digest = store.publish(PRO[0], writer(), parent=None, meta={"step": 0, "lr": 3e-4, "seat": "pro", "tied": False})
    info = store.info(PRO[0])
    assert (info.version, info.parent, info.digest) == (PRO[0], None, digest)
    assert info.meta == {"step": 0, "lr": 3e-4, "seat": "pro", "tied": False}
    assert info.created.endswith("+00:00")
    assert sorted(p.name for p in store.path(PRO[0]).iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "version.json",
    ]  # fmt: skip
    assert store.path(PRO[0]) == store.root / "pro" / "0"
    assert store.verify(PRO[0]) == info


def test_versions_are_sorted_as_numbers_and_strangers_are_ignored(store: AdapterStore) -> None:
    for n in (10, 2, 0):
        store.publish(PRO[n], writer(safetensors(SHAPES, n)), parent=None)
    for name in ("03", ".tmp-4-ab", "four", "5"):
        (store.root / "pro" / name).mkdir()
    assert store.versions("pro") == (PRO[0], PRO[2], PRO[10])
    assert store.latest("pro") == PRO[10]
    assert store.agents() == ("pro",)
    assert store.versions("con") == ()
    assert store.latest("con") is None


def test_a_version_never_changes(store: AdapterStore) -> None:
    digest = store.publish(PRO[1], writer(), parent=PRO[0])
    assert store.publish(PRO[1], writer(), parent=PRO[0]) == digest
    with pytest.raises(StoreError, match="pro@1 is already published with other contents"):
        store.publish(PRO[1], writer(safetensors(SHAPES, 9)), parent=PRO[0])
    with pytest.raises(StoreError, match="other contents"):
        store.publish(PRO[1], writer(config={**CONFIG, "lora_alpha": 8}), parent=PRO[0])
    assert store.verify(PRO[1]).digest == digest
    assert names(store.root / "pro") == ["1"]


def test_the_digest_is_of_contents_not_of_spelling(store: AdapterStore) -> None:
    digest = store.publish(PRO[0], writer(), parent=None)
    spaced = json.dumps(dict(reversed(CONFIG.items())), indent=8).encode()
    assert store.publish(PRO[1], writer(config=spaced), parent=None) == digest
    assert store.publish(PRO[2], writer(safetensors(SHAPES, 2)), parent=None) != digest


def test_damage_is_found_with_both_digests(store: AdapterStore) -> None:
    digest = store.publish(PRO[0], writer(), parent=None)
    path = store.path(PRO[0]) / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = folder_digest(store.path(PRO[0]))
    with pytest.raises(StoreError, match=rf"digest {found[:16]}…, published as {digest[:16]}…"):
        store.verify(PRO[0])
    with pytest.raises(StoreError, match="is damaged"):
        store.bucket_header(PRO[0])


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"version": "pro@0"}', b'{"version": "con@0", "parent": null, "digest": "%s", "created": ""}' % (b"0" * 64)])  # fmt: skip
def test_a_damaged_record_is_one_line(store: AdapterStore, text: bytes) -> None:
    store.publish(PRO[0], writer(), parent=None)
    (store.path(PRO[0]) / "version.json").write_bytes(text)
    with pytest.raises(StoreError, match=r"version\.json"):
        store.info(PRO[0])


def test_a_version_that_does_not_exist(store: AdapterStore) -> None:
    with pytest.raises(StoreError, match=r"pro/3/version\.json: No such file or directory"):
        store.info(PRO[3])


@pytest.mark.parametrize(
    "agent", ["../../x", "/etc", "a/b", "a\0b", "a\nb", ".", "..", "", "pro.v2", "pro:con", "a\\b", "débat", "CON", "nul", "x" * 300, "рro"]
)  # fmt: skip
def test_names_that_are_not_paths(store: AdapterStore, agent: str) -> None:
    with pytest.raises(ConfigError, match="not allowed"):
        store.publish(PolicyVersion(agent, 0), writer(), parent=None)
    with pytest.raises(ConfigError, match="not allowed"):
        store.versions(agent)
    with pytest.raises(ConfigError, match="count from 0"):
        store.path(PolicyVersion("pro", -1))


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "pickled weights": (writer(adapter_model__bin=b"\x80\x04"), r"adapter_model\.bin does not belong"),
    "torch file": (writer(adapter_model__pt=b"PK"), r"adapter_model\.pt does not belong"),
    "pickle": (writer(optimizer__pkl=b"\x80"), r"optimizer\.pkl does not belong"),
    "code": (writer(modeling_x__py=b"import os"), r"modeling_x\.py does not belong"),
    "no weights": (lambda folder: (folder / "adapter_config.json").write_text(json.dumps(CONFIG)) and None, "No such file"),
    "empty weights": (writer(b""), "header of 0 bytes in a file of 0"),
    "huge header": (writer((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}"), f"header of {MAX_HEADER_BYTES + 1} bytes"),
    "header beyond the file": (writer((1 << 63).to_bytes(8, "little") + b"{}"), "in a file of 10"),
    "header not JSON": (writer((4).to_bytes(8, "little") + b"\xff\xfe{}"), "not valid JSON"),
    "header with a key twice": (writer((15).to_bytes(8, "little") + b'{"a":{},"a":{}}'), "occurs twice"),
    "cut off": (writer(safetensors(SHAPES)[:-1]), "end at byte 64 of 63"),
    "longer than its tensors": (writer(safetensors(SHAPES) + b"x"), "end at byte 64 of 65"),
    "overlap": (writer(safetensors(SHAPES, lora_B={"data_offsets": [16, 48]})), "gap or overlap"),
    "offsets backwards": (writer(safetensors(SHAPES, lora_B={"data_offsets": [32, 16]})), "gap or overlap"),
    "offsets that are no pair": (writer(safetensors(SHAPES, lora_B={"data_offsets": [32]})), "malformed"),
    "offsets that are text": (writer(safetensors(SHAPES, lora_B={"data_offsets": ["32", "64"]})), "malformed"),
    "negative shape": (writer(safetensors(SHAPES, lora_B={"shape": [-4, -2]})), "malformed"),
    "shape that is a number": (writer(safetensors(SHAPES, lora_B={"shape": 7})), "malformed"),
    "dtype that is a list": (writer(safetensors(SHAPES, lora_B={"dtype": ["F32"]})), "malformed"),
    "alpha beyond any float": (writer(config={**CONFIG, "lora_alpha": 10**400}), "expected a number above 0, at most"),
    "other dtype": (writer(safetensors(SHAPES, lora_B={"dtype": "I8"})), "dtype 'I8'"),
    "wrong rank": (writer(safetensors({n: s[::-1] for n, s in SHAPES.items()}), {**CONFIG, "r": 2}), "has rank 4"),
    "A without B": (writer(safetensors({f"{STEM}.lora_A.weight": (2, 4)})), "no partner"),
    "key of another agent": (writer(safetensors({f"{STEM}.lora_A.con.weight": (2, 4)})), "not a LoRA matrix"),
    "key with one prefix too few": (writer(safetensors({"model.layers.0.q_proj.lora_A.weight": (2, 4)})), "not a LoRA matrix"),
    "base weights": (writer(safetensors({"base_model.model.lm_head.weight": (2, 4)})), "not a LoRA matrix"),
    "config not JSON": (writer(config=b"{"), r"adapter_config\.json is not valid JSON"),
    "config is a list": (writer(config=b"[]"), "does not hold a JSON object"),
    "config too deep": (writer(config=b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "not valid JSON"),
    "not LoRA": (writer(config={**CONFIG, "peft_type": "PROMPT_TUNING"}), "only LORA"),
    "rank 0": (writer(config={**CONFIG, "r": 0}), "r is 0"),
    "rank true": (writer(config={**CONFIG, "r": True}), "r is True"),
    "alpha nan": (writer(config={**CONFIG, "lora_alpha": float("nan")}), "lora_alpha is nan"),
    "remote base": (writer(config={**CONFIG, "base_model_name_or_path": "https://x.example/m"}), "remote place"),
    "remote code": (writer(config={**CONFIG, "trust_remote_code": True}), "remote code"),
    "auto map": (writer(config={**CONFIG, "auto_map": {"AutoModel": "x--y.Z"}}), "remote code"),
    "imports a library": (writer(config={**CONFIG, "auto_mapping": {"parent_library": "evil.module"}}), "would import 'evil.module'"),
}  # fmt: skip


@pytest.mark.parametrize(("write", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_folders_that_are_refused(store: AdapterStore, write: Callable[[Path], None], says: str) -> None:
    with pytest.raises(StoreError, match=says):
        store.publish(PRO[0], write, parent=None)
    assert store.versions("pro") == ()
    assert names(store.root / "pro") == []


@pytest.mark.parametrize("target", ["/etc/hostname", "adapter_config.json"])
def test_links_are_refused(store: AdapterStore, target: str) -> None:
    def write(folder: Path) -> None:
        writer()(folder)
        (folder / "README.md").symlink_to(target)

    with pytest.raises(StoreError, match="is a link or not a plain file"):
        store.publish(PRO[0], write, parent=None)


def test_a_version_that_became_a_link_is_refused(store: AdapterStore, tmp_path: Path) -> None:
    store.publish(PRO[0], writer(), parent=None)
    outside = tmp_path / "outside"
    store.path(PRO[0]).rename(outside)
    store.path(PRO[0]).symlink_to(outside)
    with pytest.raises(StoreError, match="not an adapter folder"):
        store.verify(PRO[0])
    store.path(PRO[0]).unlink()
    (store.root / "pro").rename(tmp_path / "pro")
    (store.root / "pro").symlink_to(tmp_path / "pro")
    outside.rename(tmp_path / "pro" / "0")
    with pytest.raises(StoreError, match="may not lie outside the store"):
        store.verify(PRO[0])


def test_a_slow_writer_is_never_seen_half_done(store: AdapterStore) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
        started.set()
        assert go_on.wait(20)
        writer()(folder)

    thread = threading.Thread(target=store.publish, args=(PRO[0], slow), kwargs={"parent": None})
    thread.start()
    assert started.wait(20)
    assert store.versions("pro") == ()
    assert store.latest("pro") is None
    go_on.set()
    thread.join()
    assert store.verify(store.versions("pro")[0])


def test_writers_at_once_publish_one(store: AdapterStore) -> None:
    digests, gate = [], threading.Barrier(6)

    def publish() -> None:
        def write(folder: Path) -> None:
            writer()(folder)
            gate.wait(20)

        digests.append(store.publish(PRO[0], write, parent=None))

    threads = [threading.Thread(target=publish) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 6
    assert set(digests) == {store.verify(PRO[0]).digest}
    assert names(store.root / "pro") == ["0"]


KILLED = """
import os, signal, sys
from pathlib import Path
from selfplay.store.adapters import AdapterStore
from selfplay.types import PolicyVersion
def write(folder):
    (folder / "adapter_config.json").write_text("{}")
    os.kill(os.getpid(), signal.SIGKILL)
AdapterStore(Path(sys.argv[1])).publish(PolicyVersion("pro", 1), write, parent=None)
"""


def test_a_killed_writer_leaves_the_last_version_and_a_leftover_that_can_be_removed(store: AdapterStore) -> None:
    store.publish(PRO[0], writer(), parent=None)
    done = subprocess.run([sys.executable, "-c", KILLED, str(store.root)], check=False)
    assert done.returncode == -9
    assert store.versions("pro") == (PRO[0],)
    assert store.remove_leftovers() == 1
    assert names(store.root / "pro") == ["0"]
    store.publish(PRO[1], writer(), parent=PRO[0])


FULL = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from selfplay.errors import StoreError
from selfplay.store.adapters import AdapterStore
from selfplay.types import PolicyVersion
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
def write(folder):
    (folder / "adapter_model.safetensors").write_bytes(bytes(5000))
try:
    AdapterStore(Path(sys.argv[1])).publish(PolicyVersion("pro", 1), write, parent=None)
except StoreError as e:
    print(e)
"""


def test_a_disk_that_takes_no_more_is_named_and_the_last_version_survives(store: AdapterStore) -> None:
    store.publish(PRO[0], writer(), parent=None)
    done = subprocess.run([sys.executable, "-c", FULL, str(store.root)], check=True, capture_output=True, text=True)
    assert done.stdout.startswith(f"cannot write or read {store.path(PRO[1])}: File too large")
    assert names(store.root / "pro") == ["0"]
    store.verify(PRO[0])


def test_an_unwritable_place_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    with pytest.raises(StoreError, match="Not a directory"):
        AdapterStore(tmp_path / "plain").publish(PRO[0], writer(), parent=None)


def test_the_store_needs_no_torch() -> None:
    code = "import sys, selfplay.store.adapters; assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
