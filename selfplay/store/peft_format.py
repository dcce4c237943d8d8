"""What an adapter folder may hold, checked before anything loads it: plain LoRA, or whole modules, in safetensors; nothing
executable.

Reads only the safetensors header (JSON, bounded) and adapter_config.json; needs no torch. An adapter folder may come
from somebody else, so every size and offset is checked, and what could run code on load is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfplay.config.plain_file import read_plain
from selfplay.errors import StoreError
from selfplay.models.tensor_header import HeaderError, TensorHeader, TensorInfo, read_tensor_header, unique_keys
from selfplay.store.atomic import store_errors
from selfplay.types import Scalar

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
MAX_HEADER_BYTES = 16 << 20
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 4096
MAX_ALPHA = 1e6
_ALLOWED = {WEIGHTS_NAME, CONFIG_NAME, "version.json", "README.md"}
_DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
_NAME = re.compile(r"base_model\.model\.[A-Za-z0-9_.]{1,400}\.lora_(A|B)\.weight\Z")
_WHOLE = re.compile(r"base_model\.model\.[A-Za-z0-9_.]{1,400}\.(weight|bias)\Z")
_MAX_DIMS = 4
_CHUNK = 1 << 20


def check_folder(folder: Path) -> None:
    """Raise `StoreError` naming the first thing in the folder that an adapter must not have."""
    with store_errors(folder):
        if folder.is_symlink() or not folder.is_dir():
            raise StoreError(f"{folder} is not an adapter folder")
        for entry in sorted(folder.iterdir()):
            if entry.is_symlink() or not entry.is_file():
                raise StoreError(f"{entry} is a link or not a plain file; an adapter folder holds plain files only")
            if entry.name not in _ALLOWED:
                raise StoreError(
                    f"{entry} does not belong in an adapter folder; weights are read from {WEIGHTS_NAME} only"
                )
    config = read_config(folder)
    entries = read_entries(folder)[1]
    if whole_modules(config):
        _check_whole(folder, entries, config)
    else:
        _check_pairs(folder, entries, config)


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json, checked: LoRA, sane rank and alpha, nothing that makes a loader import or fetch code."""
    path = folder / CONFIG_NAME
    with store_errors(path):
        config = _json_object(path, read_plain(path, MAX_CONFIG_BYTES))
    if config.get("peft_type") != "LORA":
        raise StoreError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA is supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise StoreError(f"{path}: r is {rank!r}, expected 1..{MAX_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= MAX_ALPHA:
        raise StoreError(f"{path}: lora_alpha is {str(alpha)[:40]}, expected a number above 0, at most {MAX_ALPHA:g}")
    _refuse_code(path, config)
    return config


def whole_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that the version replaces, with all their parameters, instead of adding low-rank matrices; usually none."""
    modules: Any = config.get("modules_to_save")
    return tuple(modules) if _is_str_list(modules) else ()


def engine_config(config: dict[str, Any]) -> dict[str, Scalar | list[str]]:
    """The fields of an adapter_config that are plain values: what a `BucketHeader` carries to an engine."""
    return {k: v for k, v in config.items() if isinstance(v, bool | int | float | str) or _is_str_list(v)}


def read_entries(folder: Path) -> TensorHeader:
    """The header of the weights file; every tensor is what adapter_config.json announces, of a known dtype, and they tile the
    file exactly."""
    path, whole = folder / WEIGHTS_NAME, bool(whole_modules(read_config(folder)))
    with store_errors(path):
        try:
            header = read_tensor_header(path, MAX_HEADER_BYTES)
        except HeaderError as e:
            raise StoreError(f"{path}: {e}") from None
    for tensor in header.tensors:
        _check_tensor(path, tensor, whole)
    return header


def folder_digest(folder: Path) -> str:
    """sha256 over the weights file and the canonical form (sorted keys, no spaces) of adapter_config.json."""
    config = json.dumps(read_config(folder), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    path = folder / WEIGHTS_NAME
    with store_errors(path), path.open("rb") as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def data_crc32(folder: Path, offset: int) -> int:
    """crc32 of the data section of the weights file."""
    crc, path = 0, folder / WEIGHTS_NAME
    with store_errors(path), path.open("rb") as f:
        f.seek(offset)
        while chunk := f.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def bucket_dtype(path: Path, entries: tuple[TensorInfo, ...]) -> tuple[str, int]:
    """(dtype name, bytes per element) when all tensors share one; else `StoreError`."""
    found = {e.dtype for e in entries}
    if len(found) != 1:
        raise StoreError(f"{path} mixes the dtypes {', '.join(sorted(found))}; an adapter has one")
    return _DTYPES[found.pop()]


def _check_tensor(path: Path, tensor: TensorInfo, whole: bool) -> None:
    name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
    if whole and (_NAME.match(name) or not _WHOLE.match(name)):
        raise StoreError(
            f"{path}: tensor {name[:120]!r} is not a module's parameter (base_model.model.….weight|bias), as modules_to_save says"
        )
    if not whole and not _NAME.match(name):
        raise StoreError(f"{path}: tensor {name[:120]!r} is not a LoRA matrix (base_model.model.….lora_A|B.weight)")
    if dtype not in _DTYPES:
        raise StoreError(f"{path}: {name!r} has dtype {dtype!r}, expected one of {', '.join(_DTYPES)}")
    dims = range(1, _MAX_DIMS + 1) if whole else (2,)
    if len(shape) not in dims or math.prod(shape) * _DTYPES[dtype][1] != tensor.end - tensor.start:
        raise StoreError(f"{path}: {name!r} of shape {shape} does not fill its {tensor.end - tensor.start} bytes")


def _check_whole(folder: Path, entries: tuple[TensorInfo, ...], config: Mapping[str, Any]) -> None:
    """Every module that is announced is there. One that shares its weights with an announced one may be there as well."""
    found = {e.name.removeprefix("base_model.model.").rpartition(".")[0] for e in entries}
    missing = sorted(set(whole_modules(config)) - found)
    if missing:
        raise StoreError(
            f"{folder}: {CONFIG_NAME} says that {missing[0]!r} is saved, and {WEIGHTS_NAME} does not hold it"
        )


def _check_pairs(folder: Path, entries: tuple[TensorInfo, ...], config: dict[str, Any]) -> None:
    """Every A [r, in] has its B [out, r], and one rank unless the config patterns it."""
    shapes = {e.name: e.shape for e in entries}
    for name, shape in shapes.items():
        is_a = name.endswith(".lora_A.weight")
        stem = name.removesuffix(".lora_A.weight" if is_a else ".lora_B.weight")
        partner = shapes.get(f"{stem}.lora_{'B' if is_a else 'A'}.weight")
        rank = shape[0] if is_a else shape[1]
        if partner is None or rank != (partner[1] if is_a else partner[0]):
            raise StoreError(f"{folder}: {name!r} of shape {shape} has no partner of the same rank (it is {partner})")
        if not config.get("rank_pattern") and rank != config["r"]:
            raise StoreError(f"{folder}: {name!r} has rank {rank} but {CONFIG_NAME} says r = {config['r']}")


def _refuse_code(path: Path, config: dict[str, Any]) -> None:
    base = config.get("base_model_name_or_path")
    if base is not None and (not isinstance(base, str) or "://" in base):
        raise StoreError(f"{path}: base_model_name_or_path {base!r} points to a remote place")
    if config.get("trust_remote_code") or config.get("auto_map"):
        raise StoreError(f"{path} asks for remote code (trust_remote_code or auto_map): refused")
    mapping = config.get("auto_mapping")
    library = mapping.get("parent_library") if isinstance(mapping, dict) else None
    if mapping is not None and (not isinstance(library, str) or library.partition(".")[0] != "transformers"):
        raise StoreError(f"{path}: auto_mapping would import {library!r}: refused")


def _json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as e:
        raise StoreError(f"{path} is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise StoreError(f"{path} does not hold a JSON object")
    return value


def _is_str_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) for x in value)
