"""What runs inside vLLM's engine process: receiving adapters, holding them in memory, and leaving with the parent.

vLLM mixes `AdapterWorker` into its worker class and calls the ``selfplay_…`` methods between two engine steps, so each
must be short: receiving, checking and building an adapter happens in a thread of `selfplay.sync.Staging`.

vLLM knows adapters by path. A path ``mem://NAME`` means an adapter built here; `_load_adapter` is taught to find it, so
whatever vLLM evicts from its caches comes back from memory as long as the adapter is not dropped.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from typing import Any

import msgspec
import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from selfplay.errors import SyncError
from selfplay.policy import cpu_lora
from selfplay.sync import Staging
from selfplay.sync.host_memory import HOST_MEMORY
from selfplay.wire.messages import BucketHeader, JoinWeights

SCHEME = "mem://"
PENDING = "pending"
_PARENT_CHECK_S = 0.25
ORPHANED_EXIT_CODE = 17
_ENDED_REMEMBERED = 4096


class AdapterWorker:
    """The methods of the server's engine in the worker; ``name`` is unique per installation."""

    selfplay: AdapterRoom
    selfplay_flights: FlightCounter

    def selfplay_setup(self, sync_timeout_s: float, correct_kernel: bool) -> dict[str, Any]:
        """Once, after the model is loaded: what device it runs on and how many layers got the corrected kernel."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self.selfplay = AdapterRoom(runner.lora_manager, sync_timeout_s)
        self.selfplay_flights = FlightCounter(runner)
        device = str(runner.device)
        correct = correct_kernel and device == "cpu"
        layers = cpu_lora.apply(runner.lora_manager._adapter_manager) if correct else 0
        self.selfplay.use_cpu_slots = layers > 0
        return {"device": device, "corrected_layers": layers, "threads": torch.get_num_threads(), "pid": os.getpid()}

    def selfplay_join(self, message: bytes) -> None:
        """Begin to join a weights group, in a thread."""
        self.selfplay.join(msgspec.msgpack.decode(message, type=JoinWeights))

    def selfplay_joined(self) -> str:
        """``pending``, empty when joined, or what went wrong."""
        return self.selfplay.joined()

    def selfplay_begin(self, name: str, adapter_id: int, header: bytes) -> str:
        """Begin to receive; an error in words, or empty."""
        return self.selfplay.begin(name, adapter_id, msgspec.msgpack.decode(header, type=BucketHeader))

    def selfplay_commit(self, name: str) -> dict[str, Any]:
        """Register the adapter if it has arrived: ``state`` is ``pending``, ``failed`` (with ``error``) or ``done``."""
        return self.selfplay.commit(name)

    def selfplay_abort(self, name: str) -> None:
        """Forget an adapter that is on its way."""
        self.selfplay.abort(name)

    def selfplay_swap(self, old: str, old_id: int, new: str) -> dict[str, Any]:
        """Give ``old`` the weights of ``new``; ``counts``: sampled tokens by request, ``over``: requests that ended lately."""
        error = self.selfplay_flights.error or self.selfplay.swap(old, old_id, new)
        return {"error": error, "counts": self.selfplay_flights.counts(), "over": self.selfplay_flights.over()}

    def selfplay_drop(self, name: str) -> None:
        """Free an adapter."""
        self.selfplay.drop(name)


class AdapterRoom:
    """The adapters of one worker, by name: arriving and arrived."""

    def __init__(self, worker_manager: Any, sync_timeout_s: float) -> None:
        self._worker_manager, self._manager = worker_manager, worker_manager._adapter_manager
        self._staging: Staging[Any] = Staging(timeout_s=sync_timeout_s)
        self._built: dict[str, Any] = {}
        self.use_cpu_slots = False
        """Adapters are built as the slots of `cpu_lora` hold them."""
        self._layers = LayerBuilder(self._manager.model)
        self._joining: _Joining | None = None
        load = worker_manager._load_adapter

        def load_adapter(request: Any) -> Any:
            built = self._built.get(request.lora_path.removeprefix(SCHEME))
            return load(request) if built is None else built

        worker_manager._load_adapter = load_adapter

    def join(self, message: JoinWeights) -> None:
        self._joining = _Joining(self._staging, message)

    def joined(self) -> str:
        return "no weights group was asked for" if self._joining is None else self._joining.state()

    def begin(self, name: str, adapter_id: int, header: BucketHeader) -> str:
        try:
            self._staging.begin(name, header, lambda tensors, h: self._build(adapter_id, tensors, h))
        except SyncError as e:
            return str(e)
        return ""

    def commit(self, name: str) -> dict[str, Any]:
        started = time.perf_counter()
        if name in self._built:
            return {"state": "done", "blocked_ms": 0.0}  # asked again because another worker was not there yet
        if not self._staging.ready(name):
            return {"state": PENDING}
        try:
            adapter = self._staging.take(name, 0.0)
        except SyncError as e:
            return {"state": "failed", "error": str(e)}
        self._built[name] = adapter
        if len(self._manager) + 1 > self._manager.capacity:
            self._manager.remove_oldest_adapter()
        self._manager.add_adapter(adapter)
        return {"state": "done", "blocked_ms": (time.perf_counter() - started) * 1e3}

    def abort(self, name: str) -> None:
        self._staging.abort(name)

    def swap(self, old: str, old_id: int, new: str) -> str:
        """Requests on ``old`` go on with the weights of ``new``; an error in words, or empty.

        The slot is filled anew by vLLM itself before its next step, under the old id.
        """
        if old not in self._built or new not in self._built:
            return f"{old} cannot go on as {new}: both must be installed"
        renamed = copy.copy(self._built[new])
        renamed.id = old_id
        self._manager.remove_adapter(old_id)
        self._built[old] = renamed
        self._manager.add_adapter(renamed)
        return ""

    def drop(self, name: str) -> None:
        built = self._built.pop(name, None)
        if built is not None:
            self._manager.remove_adapter(built.id)

    def _build(self, adapter_id: int, tensors: dict[str, Tensor], header: BucketHeader) -> Any:
        """A vLLM adapter out of PEFT tensors, packed as the model's layers want it. Runs beside the engine."""
        manager = self._worker_manager
        dtype = manager.lora_config.lora_dtype
        fields = {**header.adapter_config, "vllm_max_position_embeddings": manager.max_position_embeddings}
        helper = PEFTHelper.from_dict(fields)
        helper.validate_legal(manager.lora_config)
        adapter = manager._lora_model_cls(
            adapter_id, helper.r, self._layers.build(tensors, helper, dtype, self.use_cpu_slots)
        )
        self._manager._create_merged_loras_inplace(adapter)
        unknown = sorted(set(adapter.loras) - set(self._manager.modules))
        if unknown:
            raise SyncError(f"the engine has no layer for {unknown[0]}, which the adapter changes")
        return adapter


class LayerBuilder:
    """vLLM's layers of an adapter out of PEFT tensors. All versions of an agent have the same names: each is read once."""

    def __init__(self, model: Any) -> None:
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._mapper = mapper.get_rename_mapper() if mapper else None
        self._skip: list[str] | None = getattr(model, "lora_skip_prefixes", None)
        self._names: dict[str, tuple[str, str, bool] | None] = {}

    def build(
        self, tensors: dict[str, Tensor], helper: PEFTHelper, dtype: torch.dtype, cpu_slots: bool
    ) -> dict[str, LoRALayerWeights]:
        """Module → its two matrices, B scaled: vLLM has nothing left to do when the scale is 1.

        They are ``tensors`` themselves where the type is ``dtype``; with ``cpu_slots`` B is a copy whose transpose is contiguous.
        """
        layers: dict[str, LoRALayerWeights] = {}
        for name, tensor in tensors.items():
            if name not in self._names:
                self._names[name] = self._read(name)
            if (known := self._names[name]) is None:
                continue
            module, peft_module, is_a = known
            if module not in layers:
                # ranks and scales may be given by module, and then by the name before it is mapped
                layers[module] = LoRALayerWeights.from_config(module, helper, peft_module)
            setattr(layers[module], "lora_a" if is_a else "lora_b", tensor.to("cpu", dtype))
        if cpu_slots and layers:
            _scale_transposed(layers)
        else:
            torch._foreach_mul_([x.lora_b for x in layers.values()], [x.scaling for x in layers.values()])
        for layer in layers.values():
            layer.scaling = 1
        return layers

    def _read(self, name: str) -> tuple[str, str, bool] | None:
        """(vLLM's module, PEFT's module, whether it is A), or None for a part of the model that is not loaded."""
        if self._skip and LoRAModel._should_skip_module(name, self._skip):
            return None
        (module, is_a), (peft_module, _) = (
            parse_fine_tuned_lora_name(name, self._mapper),
            parse_fine_tuned_lora_name(name),
        )
        return module, peft_module, is_a


def _scale_transposed(layers: dict[str, LoRALayerWeights]) -> None:
    """Scale every B [out, rank] into memory of its own, as [rank, out]: the engine's loop then only copies it into a slot."""
    sizes = [x.lora_b.numel() for x in layers.values()]
    dtype = next(iter(layers.values())).lora_b.dtype
    rooms = HOST_MEMORY.take(sum(sizes) * dtype.itemsize).view(dtype).split(sizes)
    for layer, room in zip(layers.values(), rooms, strict=True):
        out, rank = layer.lora_b.shape
        layer.lora_b = torch.mul(layer.lora_b.t(), layer.scaling, out=room.view(rank, out)).t()


class FlightCounter:
    """How many tokens each request of this worker has sampled, as seen between two steps."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._over: deque[str] = deque(maxlen=_ENDED_REMEMBERED)
        known = hasattr(runner, "requests") and hasattr(runner, "_update_states")
        self.error = (
            ""
            if known
            else f"{type(runner).__name__} does not tell what its requests have sampled: use another sync.interrupt"
        )
        if known:
            update = runner._update_states

            def update_states(scheduler_output: Any) -> Any:
                self._over.extend(scheduler_output.finished_req_ids)
                return update(scheduler_output)

            runner._update_states = update_states

    def counts(self) -> dict[str, int]:
        """Request → tokens sampled; a request that has ended stays until the next step."""
        return {_given_id(r): len(state.output_token_ids) for r, state in self._runner.requests.items()}

    def over(self) -> list[str]:
        """Requests that ended before the present step."""
        return [_given_id(r) for r in self._over]


def _given_id(internal: str) -> str:
    """The id a request was made with; vLLM appends a dash and eight random characters."""
    return internal.rpartition("-")[0]


class _Joining:
    """Joining a group takes as long as the others need; meanwhile the engine goes on."""

    def __init__(self, staging: Staging[Any], message: JoinWeights) -> None:
        self._staging, self._message = staging, message
        self._error = ""
        self._thread = threading.Thread(target=self._join, name="join weights group", daemon=True)
        self._thread.start()

    def state(self) -> str:
        return PENDING if self._thread.is_alive() else self._error

    def _join(self) -> None:
        m = self._message
        try:
            self._staging.join(
                m.transport, address=m.address, rank=m.rank, world_size=m.world_size, timeout_s=m.timeout_s
            )
        except Exception as e:  # noqa: BLE001  the thread's boundary: the server asks for the outcome and reports it
            self._error = str(e) or type(e).__name__


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(ORPHANED_EXIT_CODE)


# The engine process imports this module while it builds its worker. From then on it ends with the server, also when the
# server was killed and could not say goodbye.
threading.Thread(target=_leave_with, args=(os.getppid(),), name="parent watch", daemon=True).start()
