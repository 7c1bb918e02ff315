"""From `speculative_config` to its parts: the drafter, what its steps cost, what is accepted."""

from dataclasses import replace
from pathlib import Path

from servecast.calibration.acceptance import read_lengths
from servecast.calibration.fits import load_fit
from servecast.calibration.profile import GENERIC, Profile
from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.drafting import ASYNC_METHODS, LOOKUPS, Drafter, drafter_of
from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_format import KvFormat
from servecast.costmodels.quantization import with_quantization
from servecast.costmodels.roofline import Roofline
from servecast.costmodels.shape import CostModel
from servecast.costmodels.specs import HardwareSpec, ModelSpec, Parallelism
from servecast.costmodels.speculative import DraftWork, Heads, Layers, Link, Lookup, Speculative
from servecast.scenarios.drafts import (
    Acceptance as AcceptanceBlock,
)
from servecast.scenarios.drafts import (
    HierarchicalAcceptance,
    IidAcceptance,
    MeanAcceptance,
    MixAcceptance,
    OneAcceptance,
    PositionAcceptance,
    SpeculativeConfig,
    TraceAcceptance,
)
from servecast.scenarios.schema import Scenario
from servecast.sim.acceptance import (
    Acceptance,
    Hierarchical,
    Mean,
    Process,
    RecordedLengths,
    iid,
)
from servecast.sim.speculation import AdaptiveTokens, Speculation

#: What stands for a method whose acceptance the scenario leaves open.
DEFAULT_FITS = {
    "draft_model": "draft-model",
    "eagle": "eagle-chat",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "medusa": "medusa",
    "ngram": "ngram-chat",
    "suffix": "ngram-chat",
}

#: The same of a tree.
TREE_FITS = {"eagle": "eagle2-tree", "eagle3": "eagle2-tree", "medusa": "medusa"}

#: Share of the rounds without an accepted n-gram in which one matched for nothing: what
#: SpecDecode-Bench's simulator takes for ShareGPT and GSM8K (0.4 for CNN, 0.8 for InstructCoder;
#: estimates, arXiv 2601.11580).
MATCH = 0.2


#: 8-bit integers go by the name of how vLLM loads them.
INT8 = "compressed-tensors"


def drafter_for(config: SpeculativeConfig, target: ModelSpec, engine_tensor: int) -> Drafter:
    """What drafts for a target. Raises InputError, naming the key, for what vLLM would refuse."""
    try:
        return _drafter_for(config, target, engine_tensor)
    except InputError as error:
        raise InputError(f"engine.speculative_config.{error}") from None


def _drafter_for(config: SpeculativeConfig, target: ModelSpec, tensor: int) -> Drafter:
    model = None if config.model is None else load_model(config.model)
    if config.draft_device is not None and (config.drafting_method != "draft_model" or not model):
        raise InputError("draft_device: takes a draft_model with a model of its own")
    split = config.draft_tensor_parallel_size or (1 if config.draft_device else tensor)
    if split not in (1, tensor):
        raise InputError(
            f"draft_tensor_parallel_size: {split} is neither 1 nor the target's {tensor}"
        )
    drafter = drafter_of(
        config.drafting_method,
        target,
        # As deep as any rule may make a draft.
        config.draft_tree or (1,) * most_tokens(config),
        model=model,
        layers=config.draft_layers,
        parallel=Parallelism(split),
        at_once=config.parallel_drafting,
    )
    if config.quantization is None:
        return drafter
    if drafter.model is None or drafter.shares:
        raise InputError("quantization: there is no draft model to quantise")
    method = INT8 if config.quantization == "int8" else config.quantization
    return replace(drafter, model=with_quantization(drafter.model, method))


def schedules_ahead(config: SpeculativeConfig) -> bool:
    """Whether vLLM schedules asynchronously with this method, on the target's devices."""
    return config.drafting_method in ASYNC_METHODS and config.draft_device is None


def speculative_cost(
    config: SpeculativeConfig,
    drafter: Drafter,
    target: CostModel,
    model: ModelSpec,
    hardware: HardwareSpec,
    kv: KvFormat,
    profile: Profile,
    sizes: tuple[int, ...],
    *,
    hides_host: bool,
) -> Speculative:
    """The target's cost model with that of drafting around it.

    A drafter on another device is priced by generic efficiencies: the profile is the target's.
    """
    link = None
    if config.draft_device is not None:
        hardware, profile = load_hardware(config.draft_device.hardware), GENERIC
        link = Link(config.draft_device.link_latency_s, config.draft_device.link_gb_per_s * 1e9)
    work: DraftWork
    if drafter.method in LOOKUPS:
        work = Lookup()
    elif drafter.model is None:
        work = Heads(drafter, model, hardware, profile.efficiency)
    else:
        layers = Roofline(
            model=drafter.model,
            hardware=hardware,
            parallel=drafter.parallel,
            kv=kv,
            efficiency=profile.efficiency,
            host_layer_s=profile.host_layer_s,
            cuda_graph_sizes=sizes,
            measured=profile.kernels,
        )
        work = Layers(layers, drafter.widths, at_once=drafter.at_once)
    return Speculative(target, work, hides_host=hides_host, link=link)


def speculation_of(
    scenario: Scenario,
    config: SpeculativeConfig,
    folder: Path,
    seed: int,
    longest: int | None = None,
) -> Speculation:
    """How a run speculates; `longest` is where the drafter's positions end, if before the target's.

    Raises InputError for an acceptance that cannot be read.
    """
    classes = scenario.workload.classes or ()
    blocks = [c.acceptance or config.acceptance for c in classes] or [config.acceptance]
    # Once for each: a recording is a file.
    domains = {block: tuple(_domains(block, config, folder)) for block in dict.fromkeys(blocks)}
    widths = config.widths
    tokens = sum(widths)
    adaptive = config.adaptive
    return Speculation(
        acceptance=Acceptance(tuple(domains[block] for block in blocks)),
        seed=seed,
        tokens=tokens,
        depth=len(widths),
        eligible=tuple(c.speculates for c in classes),
        lookup=config.drafting_method in LOOKUPS,
        ahead=config.draft_device is not None,
        disable_by_batch_size=config.disable_by_batch_size,
        schedule=config.num_speculative_tokens_per_batch_size or (),
        min_tokens=config.min_sequence_tokens,
        longest=longest,
        min_running=config.min_running_requests,
        adaptive=None
        if adaptive is None
        else AdaptiveTokens(
            adaptive.window,
            adaptive.raise_above,
            adaptive.lower_below,
            adaptive.min_tokens,
            adaptive.max_tokens,
        ),
        goodput=config.goodput,
    )


def drafting_files(scenario: Scenario) -> list[str]:
    """Files, as the scenario names them, that decide how it speculates."""
    config = scenario.engine.speculative_config
    if config is None:
        return []
    named = [config.model or ""]
    if config.draft_device is not None:
        named.append(config.draft_device.hardware)
    files = [name for name in named if name.endswith((".json", ".yaml", ".yml"))]
    blocks = [config.acceptance, *(c.acceptance for c in scenario.workload.classes or ())]
    for block in blocks:
        parts = (
            [d.acceptance for d in block.domains] if isinstance(block, MixAcceptance) else [block]
        )
        for part in parts:
            if isinstance(part, TraceAcceptance):
                files.append(part.path)
            elif isinstance(part, HierarchicalAcceptance) and ".json:" in (part.fit or ""):
                files.append(str(part.fit).rpartition(":")[0])
    return files


def most_tokens(config: SpeculativeConfig) -> int:
    """Drafts that a sequence verifies at most in one step, over all rules."""
    listed = [k for _, _, k in config.num_speculative_tokens_per_batch_size or ()]
    adaptive = [config.adaptive.max_tokens] if config.adaptive else []
    return max([sum(config.widths), *listed, *adaptive])


def acceptance_source(config: SpeculativeConfig) -> str:
    """What the acceptance of drafts rests on, in words."""
    block = config.acceptance
    if block is None:
        return f"bundled fit {default_fit(config)} (the scenario names none)"
    if isinstance(block, HierarchicalAcceptance) and block.fit is not None:
        return f"fit {block.fit}"
    return {"trace": "recorded lengths", "mix": "a mix of domains"}.get(
        block.kind, f"{block.kind} as given"
    )


def default_fit(config: SpeculativeConfig) -> str:
    """The bundled fit that stands for an acceptance that the scenario leaves open.

    Raises InputError for a tree of which none is bundled.
    """
    if config.draft_tree is None:
        return DEFAULT_FITS[config.drafting_method]
    if config.drafting_method not in TREE_FITS:
        raise InputError(
            "engine.speculative_config.acceptance: a draft_tree of "
            f"{config.drafting_method} needs one: rates are then by depth of the tree"
        )
    return TREE_FITS[config.drafting_method]


def _domains(
    block: AcceptanceBlock | None, config: SpeculativeConfig, folder: Path
) -> list[tuple[float, Process]]:
    if isinstance(block, MixAcceptance):
        return [(d.weight, _process(d.acceptance, config, folder)) for d in block.domains]
    return [(1.0, _process(block, config, folder))]


def _process(block: OneAcceptance | None, config: SpeculativeConfig, folder: Path) -> Process:
    lookup = config.drafting_method in LOOKUPS
    if block is None:
        fit = load_fit(default_fit(config), folder).process
        return replace(fit, match=MATCH) if lookup else fit
    if isinstance(block, MeanAcceptance):
        return Mean(block.acceptance_length - 1).warmed(block.factor)
    match = (MATCH if block.match is None else block.match) if lookup else 1.0
    if isinstance(block, TraceAcceptance):
        recorded = read_lengths(folder / block.path)
        name = block.recorded or config.drafting_method
        if name not in recorded:
            raise InputError(
                f"{folder / block.path}: no acc_len_{name}; there are {', '.join(sorted(recorded))}"
            )
        return RecordedLengths(tuple(recorded[name]), match).warmed(block.factor)
    process: Hierarchical
    if isinstance(block, IidAcceptance):
        process = iid(block.alpha)
    elif isinstance(block, PositionAcceptance):
        process = Hierarchical(block.rates)
    elif block.fit is not None:
        process = load_fit(block.fit, folder).process
    else:
        assert block.rates is not None
        process = Hierarchical(
            block.rates,
            block.quality or (),
            block.persistence or 0.0,
            1.0 if block.depth is None else block.depth,
        )
    return replace(process, match=match).warmed(block.factor)
