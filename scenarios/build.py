"""From a scenario to the parts that simulate it."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

from servecast.calibration.fabric import bundled_fabric, fit_of
from servecast.calibration.profile import GENERIC, Profile
from servecast.calibration.spread import step_spread
from servecast.calibration.steps import load_steps
from servecast.calibration.store import load_profile
from servecast.costmodels.affine import Affine, AffineDraft, StepConstants
from servecast.costmodels.catalogue import CONFIG, GIB, load_hardware, load_model
from servecast.costmodels.drafting import Drafter, drafter_bytes, drafter_kv_bytes_per_token
from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_format import kv_format
from servecast.costmodels.memory import (
    NVLINK_BYTES_PER_S,
    STREAMED_SINCE,
    EngineMemory,
    MemoryPlan,
    plan_memory,
)
from servecast.costmodels.quantization import with_quantization
from servecast.costmodels.roofline import Roofline
from servecast.costmodels.sampling import (
    GREEDY,
    Sampling,
    published_sampling,
)
from servecast.costmodels.shape import NS_PER_S, PARTS, CostModel
from servecast.costmodels.specs import SRAM, HardwareSpec, ModelSpec, Parallelism
from servecast.costmodels.speculative import DraftWork, Heads, Layers, Lookup, Speculative
from servecast.costmodels.sram_memory import plan_sram
from servecast.costmodels.versions import (
    parse_version,
)
from servecast.costmodels.wafer import (
    FabricConstants,
    Placement,
    Wafer,
    on_a_share,
    place,
    terms_of,
)
from servecast.scenarios.bootlog import BootLog, read_boot_log
from servecast.scenarios.drafting import (
    drafter_for,
    most_tokens,
    speculation_of,
    speculative_cost,
)
from servecast.scenarios.drafts import SpeculativeConfig
from servecast.scenarios.engine_defaults import check_device, drafts_of, on_v0, resolve
from servecast.scenarios.load import LoadedScenario
from servecast.scenarios.measured import NONE, completed, measured, of_the_device, profile_of
from servecast.scenarios.schema import Engine, Scenario
from servecast.sim.control import ControlSettings
from servecast.sim.plan import SchedulerLimits
from servecast.sim.request import RequestTable
from servecast.sim.speculation import Speculation
from servecast.sim.trace import Trace
from servecast.sim.world import ALONE, Fleet, Progress, Run, simulate

#: Flags of what an SRAM device does not have.
UNKNOWN_TO_SRAM = {"boot_log": "log that is read", "cpu_offload_gb": "weights outside of it"}

#: Tokens that an SRAM device must hold where nothing is said of the longest request.
USUAL_LENGTH = 8192


@dataclass(frozen=True)
class Setup:
    """What is served, on what and how, before anything is planned.

    Attributes
    ----------
    checkpoint : the model as it is published
    model : as `dtype` and `quantization` serve it
    flags : as they were asked for
    engine : every flag with its value, defaults resolved
    drafter : of speculative decoding, whatever device it is on
    wafers : as they were asked for; None for as few as hold the model
    placement : on an SRAM device
    sampling : of its requests
    """

    checkpoint: ModelSpec
    model: ModelSpec
    hardware: HardwareSpec
    parallel: Parallelism
    flags: Engine
    engine: dict[str, Any]
    memory: EngineMemory
    drafter: Drafter | None = None
    wafers: int | None = None
    placement: Placement | None = None
    sampling: Sampling = GREEDY

    @property
    def devices(self) -> int:
        """Of one replica."""
        return self.parallel.devices if self.placement is None else self.placement.units

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """What was asked of speculative decoding, if it drafts anything."""
        return drafts_of(self.flags)

    @cached_property
    def plan(self) -> MemoryPlan:
        """The predicted start-up, whether it succeeds or not.

        Raises InputError for a split or a block size that vLLM refuses.
        """
        if self.placement is not None:
            return plan_sram(self.model, self.hardware, self.memory, self.placement)
        return plan_memory(self.model, self.hardware, self.memory)

    def changed(self, **flags: Any) -> "Setup":
        """With some flags set otherwise; defaults that depend on them follow.

        Raises InputError for what vLLM would refuse.
        """
        asked = self.flags.model_copy(update=flags)
        changed = setup_of(self.checkpoint, self.hardware, asked, self.wafers)
        return replace(changed, sampling=self.sampling)


@dataclass(frozen=True)
class Deployment:
    """One replica, ready to simulate.

    Attributes
    ----------
    engine : every flag with its value, defaults resolved
    memory : the predicted start-up
    draft_hardware, draft_devices : a drafter's own
    wafer : of an SRAM device
    longest_draft : where a draft model's positions end, if before the longest request
    """

    model: ModelSpec
    hardware: HardwareSpec
    parallel: Parallelism
    engine: dict[str, Any]
    memory: MemoryPlan
    limits: SchedulerLimits
    cost: CostModel
    profile: Profile
    speculative: SpeculativeConfig | None = None
    draft_hardware: HardwareSpec | None = None
    draft_devices: int = 0
    wafer: Wafer | None = None
    longest_draft: int | None = None

    @property
    def devices(self) -> int:
        """Of one replica, a drafter's own included."""
        if self.wafer is not None:
            return self.wafer.placement.units
        return self.parallel.devices + self.draft_devices

    @property
    def price_per_hour(self) -> float | None:
        """Of one device, the mean of target's and drafter's; None where one is not known."""
        draft = self.draft_hardware
        if draft is None or self.hardware.price_per_hour is None or draft.price_per_hour is None:
            return self.hardware.price_per_hour if draft is None else None
        whole = self.parallel.devices * self.hardware.price_per_hour
        return (whole + self.draft_devices * draft.price_per_hour) / self.devices

    @property
    def control(self) -> ControlSettings | None:
        """Adaptive control, if the engine asks for it."""
        adaptive = self.engine["adaptive"]
        if adaptive is None:
            return None
        return ControlSettings(
            adaptive["metric"],
            round(adaptive["limit_s"] * NS_PER_S),
            round(adaptive["window_s"] * NS_PER_S),
            adaptive["step"],
            max(adaptive["min_tokens"], self.limits.max_num_seqs),
        )

    def simulate(
        self,
        table: RequestTable,
        progress: Progress | None = None,
        fleet: Fleet = ALONE,
        speculation: Speculation | None = None,
    ) -> Run:
        """Serve a load; where this deployment speculates, with `speculation`."""
        return simulate(
            table,
            self.limits,
            self.cost,
            static_batching=self.engine["batching"] == "static",
            batch_wait_ns=round(self.engine["batch_wait_s"] * NS_PER_S),
            control=self.control,
            speculation=speculation,
            idle_host_s=self.profile.host_step_s if self.limits.async_scheduling else 0.0,
            swap_block_s=self.memory.block_bytes / self.hardware.host_link_bytes_per_s,
            progress=progress,
            fleet=fleet,
        )


def build(loaded: LoadedScenario, profile: Profile = GENERIC) -> Deployment:
    """Resolve, plan and assemble.

    `profile` without kernels gets those of the scenario's profile, or of its device.

    Raises InputError, naming the file, for whatever vLLM would refuse at start-up: a model that
    does not fit (by how much), a split or a block size it does not support, flags that
    contradict each other.
    """
    try:
        setup = _set_up(loaded)
        if profile.kernels is None:
            profile = calibrated(setup, loaded, profile)
        return _assemble(setup, _pool(setup, loaded.path), profile)
    except InputError as error:
        where = str(loaded.path)
        raise error if str(error).startswith(where) else InputError(f"{where}: {error}") from None


def calibrated(setup: Setup, loaded: LoadedScenario, base: Profile) -> Profile:
    """The base with the kernels that the scenario asks for, or its device's own.

    Raises InputError for a profile that cannot be read, or is another device's.
    """
    asked = loaded.scenario.profile
    if setup.placement is not None:
        if base.fabric is not None:
            return base
        if asked == NONE:
            raise InputError(f"profile: {setup.hardware.name} has no generic efficiencies")
        named = None if asked is None else beside(asked, loaded.path)
        found = bundled_fabric() if named is None else fit_of(named)
        if found is None:
            raise InputError(f"profile: {asked} is none of an SRAM device")
        return replace(base, fabric=found)
    steps = None if asked is None else load_steps(beside(asked, loaded.path))
    if steps is not None:
        return replace(base, steps=_fitting(steps, setup))
    name = profile_name(setup, loaded)
    if name is None:
        return base
    memory = setup.memory
    return measured(base, name, setup.model, setup.hardware, memory.kv, memory.tensor, v0=memory.v0)


def _fitting(steps: StepConstants, setup: Setup) -> StepConstants:
    """The constants, if they are of this deployment."""
    fitted = load_model(steps.model)
    same = replace(setup.checkpoint, name=fitted.name) == fitted
    if setup.hardware.name != steps.hardware or not same or setup.parallel.devices > 1:
        raise InputError(
            f"profile: {steps.name} was fitted to {steps.model} on one {steps.hardware}, not to "
            f"{setup.checkpoint.name} on {setup.parallel.devices} x {setup.hardware.name}"
        )
    config = setup.speculative
    if setup.model != setup.checkpoint or setup.memory.kv.bits != 16:
        raise InputError(f"profile: {steps.name} was fitted to 16-bit weights and KV")
    if config is not None and (
        config.draft_device or config.draft_tree or config.parallel_drafting or config.quantization
    ):
        raise InputError(f"profile: {steps.name} was fitted to chains on the target's device")
    if config is not None and config.drafting_method not in steps.drafts:
        raise InputError(
            f"profile: {steps.name} has no constants of {config.drafting_method}, only of "
            f"{', '.join(steps.drafts) or 'steps without drafts'}"
        )
    return steps


def spread_of(loaded: LoadedScenario, deployment: Deployment, trace: Trace) -> float:
    """Half of the 90 % interval of the logarithm of a step's time, by what a run spent it on; 0
    where no kernels were measured.

    Raises InputError as `set_up` does.
    """
    setup = set_up(loaded)
    name = None if deployment.profile.kernels is None else profile_name(setup, loaded)
    if name is None:
        return 0.0
    profile = completed(load_profile(name), setup.hardware)
    return step_spread(
        profile,
        setup.model,
        setup.memory.tensor,
        setup.memory.kv.bits,
        {f"{part}_s": float(trace.steps[f"{part}_s"].sum()) for part in PARTS},
        setup.hardware.link_bytes_per_s >= NVLINK_BYTES_PER_S,
        not of_the_device(profile, setup.hardware),
    )


def slower_and_faster(
    loaded: LoadedScenario, deployment: Deployment, spread: float
) -> list[Deployment]:
    """The same with every measured kernel at the ends of the interval of `spread_of`, faster first;
    empty where that is 0."""
    if not spread:
        return []
    return [build(loaded, deployment.profile.slower(math.exp(sign * spread))) for sign in (-1, 1)]


def bounds_of(loaded: LoadedScenario, deployment: Deployment) -> list[Deployment]:
    """The same with sets of constants that differ most and have the fitted speeds; empty where
    steps do not rest on such constants."""
    wafer, fabric = deployment.wafer, deployment.profile.fabric
    if wafer is None or fabric is None:
        return []
    # One user waits for a token, many for the slowest stage.
    model, hardware, placement = deployment.model, deployment.hardware, wafer.placement
    stages = [
        terms_of(model, hardware, replace(placement, stages=(stage,), crossings=0))
        for stage in placement.stages
    ]
    slowest = max(stages, key=lambda terms: terms.seconds(fabric.constants))
    return [
        build(loaded, replace(deployment.profile, fabric=replace(fabric, constants=constants)))
        for constants in fabric.ends(terms_of(model, hardware, placement), slowest)
    ]


def profile_name(setup: Setup, loaded: LoadedScenario) -> str | None:
    """Name or path of the profile that a scenario runs with; None for generic efficiencies."""
    asked = loaded.scenario.profile
    if asked is not None and asked != NONE:
        asked = beside(asked, loaded.path)
    return profile_of(asked, setup.hardware)


def set_up(loaded: LoadedScenario) -> Setup:
    """Resolve without planning: what `servecast kv` predicts from, even where it cannot start.

    Raises InputError as `build` does, but for a model that does not fit.
    """
    try:
        return _set_up(loaded)
    except InputError as error:
        where = str(loaded.path)
        raise error if str(error).startswith(where) else InputError(f"{where}: {error}") from None


def _set_up(loaded: LoadedScenario) -> Setup:
    scenario = loaded.scenario
    hardware = load_hardware(beside(scenario.hardware, loaded.path))
    overrides = scenario.engine.hf_overrides or {}
    model = load_model(beside(scenario.model, loaded.path), overrides)
    wafers = scenario.wafers
    if wafers is not None and hardware.kind != SRAM:
        raise InputError(f"wafers: {hardware.name} is no SRAM device")
    setup = setup_of(
        model,
        hardware,
        _located(scenario.engine, loaded.path),
        None if wafers == "auto" else wafers,
    )
    return replace(setup, sampling=_sampling(scenario, setup))


def _sampling(scenario: Scenario, setup: Setup) -> Sampling:
    """What requests say of it, and for the rest the model's publisher."""
    own = Sampling()
    if setup.engine["generation_config"] == "auto":
        own = published_sampling(setup.checkpoint.name)
    asked = scenario.workload.sampling
    return own if asked is None else replace(own, **asked.model_dump(exclude_none=True))


def _located(flags: Engine, scenario: Path) -> Engine:
    """With the files that speculative decoding names found from the scenario's folder."""
    config = flags.speculative_config
    if config is None:
        return flags
    changes: dict[str, Any] = {}
    if config.model is not None:
        changes["model"] = beside(config.model, scenario)
    if config.draft_device is not None:
        hardware = beside(config.draft_device.hardware, scenario)
        changes["draft_device"] = config.draft_device.model_copy(update={"hardware": hardware})
    return flags.model_copy(update={"speculative_config": config.model_copy(update=changes)})


def speculation_for(
    deployment: Deployment, scenario: Scenario, folder: Path, seed: int
) -> Speculation | None:
    """How a deployment speculates on a scenario's load; None where it does not.

    Raises InputError for an acceptance that cannot be read.
    """
    if deployment.speculative is None:
        return None
    return speculation_of(scenario, deployment.speculative, folder, seed, deployment.longest_draft)


def setup_of(
    checkpoint: ModelSpec, hardware: HardwareSpec, flags: Engine, wafers: int | None = None
) -> Setup:
    """Defaults filled in, and what memory depends on gathered.

    Raises InputError for flags that contradict each other, the model or the device.
    """
    engine = resolve(flags, checkpoint, hardware)
    model = checkpoint
    check_device(engine, hardware)
    if engine["dtype"] != "auto":
        model = replace(model, dtype=engine["dtype"])
    if engine["quantization"] is not None:
        model = with_quantization(model, engine["quantization"])
    parallel = Parallelism(engine["tensor_parallel_size"], engine["pipeline_parallel_size"])
    version = parse_version(engine["vllm_version"])
    spread = engine["data_parallel_size"] if model.moe is not None else 1
    sizes = engine["cudagraph_capture_sizes"]
    config, drafter = drafts_of(flags), None
    if config is not None:
        drafter = drafter_for(config, model, parallel.tensor)
    memory = EngineMemory(
        gpu_memory_utilization=engine["gpu_memory_utilization"],
        block_size=engine["block_size"],
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine["max_model_len"],
        kv=kv_format(model, engine["kv_cache_dtype"], version),
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        enforce_eager=engine["enforce_eager"],
        num_gpu_blocks_override=engine["num_gpu_blocks_override"],
        kv_cache_memory_bytes=engine["kv_cache_memory_bytes"],
        cpu_offload_gb=engine["cpu_offload_gb"],
        enable_prefix_caching=engine["enable_prefix_caching"],
        async_scheduling=engine["async_scheduling"],
        cudagraph_capture_sizes=tuple(sizes) if sizes is not None else None,
        estimate_cudagraphs=engine["estimate_cudagraphs"],
        expert_engines=spread,
        vision=not engine["language_model_only"],
        version=version,
        v0=on_v0(version, hardware, flags),
        quantised_online=(
            engine["quantization"] == "fp8"
            and checkpoint.quantization is None
            and version < STREAMED_SINCE
        ),
        drafter=drafter if config is not None and config.draft_device is None else None,
        num_speculative_tokens=most_tokens(config) if config is not None else 0,
    )
    setup = Setup(checkpoint, model, hardware, parallel, flags, engine, memory, drafter, wafers)
    return setup if hardware.kind != SRAM else _on_wafers(setup)


def _on_wafers(setup: Setup) -> Setup:
    """Placed; the longest request is what the pool holds, unless one was asked for."""
    if setup.parallel.devices > 1:
        raise InputError(
            f"engine.tensor_parallel_size: {setup.hardware.name} takes wafers, not ranks"
        )
    for key, of in UNKNOWN_TO_SRAM.items():
        if setup.engine[key]:
            raise InputError(f"engine.{key}: {setup.hardware.name} has no {of}")
    config, drafter = setup.speculative, setup.drafter
    beside, beside_kv = 0, 0.0
    if config is not None and drafter is not None:
        if config.draft_device is not None:
            raise InputError(
                f"engine.speculative_config.draft_device: not with {setup.hardware.name}"
            )
        beside = drafter_bytes(drafter, setup.model, setup.hardware)
        beside_kv = drafter_kv_bytes_per_token(drafter, setup.memory.kv)
    asked = setup.flags.max_model_len
    placement = place(
        setup.model,
        setup.hardware,
        setup.memory.kv,
        setup.wafers,
        tokens=asked or min(setup.model.max_position_embeddings, USUAL_LENGTH),
        beside_bytes=beside,
        beside_kv_bytes=beside_kv,
    )
    longest = asked or min(setup.model.max_position_embeddings, placement.kv_tokens)
    engine = {**setup.engine, "max_model_len": longest}
    if setup.flags.long_prefill_token_threshold is None:
        # Prompts leave half of the stages to those that decode.
        engine["long_prefill_token_threshold"] = max(1, len(placement.stages) // 2)
    return replace(
        setup,
        engine=engine,
        memory=replace(setup.memory, max_model_len=longest),
        placement=placement,
    )


def _pool(setup: Setup, scenario: Path) -> MemoryPlan:
    """The start-up that is simulated: predicted, or as `boot_log` has it."""
    found = boot_log_of(setup, scenario)
    if found is None:
        return setup.plan
    blocks = found.pool_blocks(setup.memory, setup.plan.layout)
    return plan_memory(
        setup.model, setup.hardware, replace(setup.memory, num_gpu_blocks_override=blocks)
    )


def boot_log_of(setup: Setup, scenario: Path) -> BootLog | None:
    """The log that the scenario names, read from beside it."""
    log = setup.engine["boot_log"]
    return None if log is None else read_boot_log(scenario.parent / log)


def _assemble(setup: Setup, memory: MemoryPlan, profile: Profile) -> Deployment:
    model, hardware, parallel, engine = setup.model, setup.hardware, setup.parallel, setup.engine
    if not memory.fits:
        raise InputError(f"{model.name} on {setup.devices} x {hardware.name} {memory.explain()}")
    sizes = () if engine["enforce_eager"] else setup.memory.capture_sizes(hardware)
    efficiency = profile.efficiency
    if hardware.kind != "gpu":
        # Launching kernels one by one is what graphs save on a GPU; elsewhere there are none.
        efficiency = replace(efficiency, eager_launch_s=0.0)
    cost: CostModel = Roofline(
        model=model,
        hardware=hardware,
        parallel=parallel,
        kv=setup.memory.kv,
        efficiency=efficiency,
        host_s=profile.host_step_s,
        host_sequence_s=profile.host_sequence_s,
        host_layer_s=profile.host_layer_s,
        block_size=engine["block_size"],
        async_scheduling=engine["async_scheduling"],
        cuda_graph_sizes=sizes,
        measured=profile.kernels,
        sampling=setup.sampling,
        version=setup.memory.version,
    )
    config, drafter = setup.speculative, setup.drafter
    steps = profile.steps
    wafer = None
    if setup.placement is not None:
        assert profile.fabric is not None
        constants = profile.fabric.constants
        wafer = Wafer(model, hardware, setup.placement, constants)
        cost = _with_drafts_on_wafers(wafer, setup, constants)
    elif steps is not None:
        cost = Affine(steps)
        if config is not None:
            work = AffineDraft(steps.drafts[config.drafting_method])
            cost = Speculative(cost, work, hides_host=False)
    elif config is not None and drafter is not None:
        cost = speculative_cost(
            config,
            drafter,
            cost,
            model,
            hardware,
            setup.memory.kv,
            replace(profile, efficiency=efficiency),
            sizes,
            hides_host=engine["async_scheduling"] and hardware.kind != "cpu",
        )
    budget = engine["max_num_batched_tokens"]
    if engine["batching"] == "continuous_unchunked":
        budget = engine["max_num_seqs"] * engine["max_model_len"]
    swap = engine["preemption_mode"] == "swap"
    block_size, blocks = memory.block_size, memory.blocks
    if engine["kv"] == "contiguous":
        block_size, blocks = contiguous(memory, engine["kv_reserve"])
    limits = SchedulerLimits(
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_gpu_blocks=blocks,
        max_model_len=engine["max_model_len"],
        enable_chunked_prefill=engine["enable_chunked_prefill"],
        enable_prefix_caching=engine["enable_prefix_caching"],
        scheduling_policy=engine["scheduling_policy"],
        long_prefill_token_threshold=engine["long_prefill_token_threshold"],
        watermark=engine["watermark"],
        scheduler_reserve_full_isl=engine["scheduler_reserve_full_isl"],
        async_scheduling=engine["async_scheduling"],
        spec_method=None if drafter is None else drafter.scheduled_as,
        num_speculative_tokens=setup.memory.num_speculative_tokens,
        swap_blocks=int(engine["swap_space"] * GIB // memory.block_bytes) if swap else 0,
    )
    draft_hardware, draft_devices, longest_draft = None, 0, None
    if drafter is not None and drafter.method == "draft_model" and drafter.model is not None:
        positions = drafter.model.max_position_embeddings
        if 0 < positions < engine["max_model_len"]:
            longest_draft = positions
    if config is not None and drafter is not None and config.draft_device is not None:
        draft_hardware = load_hardware(config.draft_device.hardware)
        draft_devices = drafter.parallel.devices
        _check_draft_device(setup, drafter, draft_hardware)
    return Deployment(
        model,
        hardware,
        parallel,
        engine,
        memory,
        limits,
        cost,
        profile,
        config,
        draft_hardware,
        draft_devices,
        wafer,
        longest_draft,
    )


def _check_draft_device(setup: Setup, drafter: Drafter, hardware: HardwareSpec) -> None:
    """The drafter's own device must take its numbers, and hold it with KV for one request."""
    key, model = "engine.speculative_config.draft_device", drafter.model
    assert model is not None
    if hardware.kind == SRAM:
        raise InputError(f"{key}: not {hardware.name}")
    kind = {"dtype": model.dtype, "quantization": model.quantization and model.quantization.method}
    try:
        check_device(kind, hardware)
        engine = replace(
            setup.memory,
            drafter=None,
            num_speculative_tokens=0,
            tensor=drafter.parallel.tensor,
            max_model_len=min(setup.engine["max_model_len"], model.max_position_embeddings),
            num_gpu_blocks_override=None,
            kv_cache_memory_bytes=None,
        )
        plan = plan_memory(model, hardware, engine)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    if not plan.fits:
        raise InputError(f"{key}: {model.name} on {hardware.name} {plan.explain()}")


def _with_drafts_on_wafers(wafer: Wafer, setup: Setup, constants: FabricConstants) -> CostModel:
    """Steps on an SRAM device, those of a drafter beside the target included."""
    placement, config, drafter = wafer.placement, setup.speculative, setup.drafter
    if config is None or drafter is None:
        return wafer
    work: DraftWork = Lookup()
    if drafter.method == "medusa":
        work = Heads(drafter, setup.model, setup.hardware, GENERIC.efficiency)
    elif drafter.model is not None:
        # Its layers have their part of the cores, as everything has that lies on the wafer.
        own = place(drafter.model, setup.hardware, setup.memory.kv)
        small = on_a_share(own, min(1.0, own.unit_bytes / placement.unit_bytes))
        layers = Wafer(drafter.model, setup.hardware, small, constants)
        work = Layers(layers, drafter.widths, at_once=drafter.at_once)
    return Speculative(wafer, work, hides_host=False)


def contiguous(memory: MemoryPlan, reserve: float) -> tuple[int, int]:
    """Tokens of a sequence's one allocation, and how many the pool holds with the null block's.

    As engines did before paging: each sequence gets `reserve` of max_model_len in one piece
    when it is admitted, and another such piece if it outgrows it.

    Raises InputError where the pool holds none.
    """
    piece = max(1, ceil(reserve * memory.max_model_len))
    pieces = memory.usable_blocks * memory.block_size // piece
    if pieces < ceil(memory.max_model_len / piece):
        raise InputError(
            f"engine.kv: contiguous: the pool of {memory.tokens:,} tokens does not hold one "
            f"sequence of {memory.max_model_len:,}"
        )
    return piece, pieces + 1


#: How the name of a model or device ends that is a file and not in the catalogue.
FILES = (".json", ".yaml", ".yml")


def beside(name: str, scenario: Path) -> str:
    """Relative paths start at the scenario's folder; catalogue names stay as they are."""
    found = scenario.parent / name
    return str(found) if name.endswith(FILES) or (found / CONFIG).is_file() else name


def memory_summary(memory: MemoryPlan) -> dict[str, int]:
    """The memory block of `summary.json`."""
    wanted = ("weights", "activation", "graph", "other", "kv", "total")
    return {f"{name}_bytes": getattr(memory, f"{name}_bytes") for name in wanted}
