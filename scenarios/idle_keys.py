"""Keys of a scenario that do nothing as the rest of it stands: told, not refused."""

from collections.abc import Iterator

from servecast.costmodels.specs import SRAM, HardwareSpec
from servecast.scenarios.schema import Scenario


def idle_keys(scenario: Scenario, hardware: HardwareSpec) -> list[str]:
    """A line for each key that was set and has no effect, and what would give it one."""
    return [f"{key}: has no effect {why}" for key, why in _idle(scenario, hardware)]


def _idle(scenario: Scenario, hardware: HardwareSpec) -> Iterator[tuple[str, str]]:
    engine = scenario.engine
    given = {key for key in engine.model_fields_set if getattr(engine, key) is not None}
    if "batch_wait_s" in given and engine.batching != "static":
        yield "engine.batch_wait_s", "without batching: static"
    if "swap_space" in given and engine.preemption_mode != "swap":
        yield "engine.swap_space", "without preemption_mode: swap"
    if "gpu_memory_utilization" in given and hardware.kind == SRAM:
        yield "engine.gpu_memory_utilization", f"on {hardware.name}: weights and KV lie in SRAM"
    if engine.speculative_config is None:
        for one in scenario.workload.classes or ():
            if one.acceptance is not None:
                key = f"workload.classes.{one.name}.acceptance"
                yield key, "without engine.speculative_config"
