"""What ``dtype=auto`` becomes on machines that multiply bfloat16 and on those that only emulate it."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfplay.models import machine


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("processor: 0\nflags\t\t: fpu avx2 fma\n", False),
        ("", False),
    ],
)
def test_cpu_flags_decide(tmp_path: Path, text: str, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert bool(machine._BFLOAT16_FLAGS & machine.cpu_flags(cpuinfo)) is fast
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda: fast)
    assert machine.auto_dtype("bfloat16") == ("bfloat16" if fast else "float32")
    assert machine.auto_dtype("float32") == "float32"


def test_a_system_without_cpuinfo_has_no_flags(tmp_path: Path) -> None:
    assert machine.cpu_flags(tmp_path / "none") == set()
