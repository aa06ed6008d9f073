"""The path of one spend is short: few functions, few representations, one way from the handler to the store."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from odograph.ledger.backend import LocalBackend

TOOL = Path(__file__).parents[2] / "tools" / "trace_spend.py"
MAX_FUNCTIONS_IN_PROCESS = 20
MAX_FUNCTIONS_OVER_HTTP = 40
MAX_REPRESENTATIONS = 10
# Every spend passes these, whichever way it came.
SHARED = {
    "ledger/engine.py: carry_out",
    "ledger/commands.py: Charge.wants",
    "ledger/stores/sqlite.py: SqliteStore.write",
    "ledger/commands.py: Charge.apply",
    "core/gate.py: decide",
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trace_spend", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["trace_spend"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def too_long(trace: Any, functions: int) -> bool:  # noqa: ANN401  of a tool
    return len(trace.functions) > functions or len(trace.representations) > MAX_REPRESENTATIONS


def test_a_spend_in_this_process_is_short(tool: ModuleType, tmp_path: Path) -> None:
    trace = tool.trace_in_process(tmp_path)
    assert not too_long(trace, MAX_FUNCTIONS_IN_PROCESS), (trace.functions, trace.representations)
    assert {*trace.functions} > SHARED


def test_a_spend_over_http_is_short_and_ends_on_the_same_path(tool: ModuleType, tmp_path: Path) -> None:
    trace = tool.trace_over_http(tmp_path)
    assert not too_long(trace, MAX_FUNCTIONS_OVER_HTTP), (trace.functions, trace.representations)
    assert {*trace.functions} > SHARED


def test_a_detour_is_caught(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    price = LocalBackend.price
    source = "\n".join(f"def step_{number}():\n    pass" for number in range(5))
    names: dict[str, Any] = {}
    exec(compile(source, f"{tool.ROOT}/detour.py", "exec"), names)  # noqa: S102  functions of a file of Odograph's
    detours = [function for name, function in names.items() if name.startswith("step_")]

    def detour(*args: Any) -> Any:  # noqa: ANN401  as it is
        for function in detours:
            function()
        return price(*args)

    monkeypatch.setattr(LocalBackend, "price", detour)
    assert too_long(tool.trace_in_process(tmp_path), MAX_FUNCTIONS_IN_PROCESS)
