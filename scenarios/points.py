"""One simulated point of a sweep: what it is, by content, and what comes of it.

A point's key is a hash of everything that decides its result: the scenario, the content of the
files it names, the seed, how many requests of the load are used, and servecast's version. The
same point is the same file in every sweep, on every machine.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from servecast.calibration.profile import GENERIC, Profile
from servecast.costmodels.catalogue import CONFIG
from servecast.costmodels.errors import InputError
from servecast.costmodels.sampling import GENERATION_CONFIG
from servecast.costmodels.shape import NS_PER_S
from servecast.reports.metrics import summarise
from servecast.scenarios.build import FILES, build, speculation_for
from servecast.scenarios.drafting import drafting_files
from servecast.scenarios.load import LoadedScenario
from servecast.scenarios.run import fleet_of, run_facts, servecast_version
from servecast.scenarios.schema import Scenario
from servecast.scenarios.workload import build_requests
from servecast.sim.plan import SchedulerLimits
from servecast.sim.trace import Trace

#: Near enough to a limit to be held by it.
AT_THE_LIMIT = 0.97


@dataclass(frozen=True)
class Point:
    """A scenario with a seed.

    Attributes
    ----------
    base : the scenario's file, where relative paths start
    requests : only so many of the load; None for all
    profile : the device's coefficients
    version : of the servecast that asked, whatever a worker has installed
    """

    scenario: Scenario
    base: Path
    seed: int
    requests: int | None = None
    profile: Profile = GENERIC
    version: str = field(default_factory=servecast_version)

    @cached_property
    def key(self) -> str:
        """Hexadecimal name of the result."""
        content = {
            "scenario": self.scenario.model_dump(mode="json", exclude={"name", "description"}),
            "files": [_file_hash(path) for path in self._files()],
            "seed": self.seed,
            "requests": self.requests,
            "profile": repr(self.profile),
            "version": self.version,
        }
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _files(self) -> list[Path]:
        workload = self.scenario.workload
        blocks = [workload.arrivals, workload.lengths]
        blocks += [c.lengths for c in workload.classes or ()]
        named = [getattr(block, "path", None) for block in blocks]
        scenario = self.scenario
        facts = (scenario.model, scenario.hardware, scenario.profile or "")
        named += [name for name in facts if name.endswith(FILES)]
        named.append(scenario.engine.boot_log)
        named += drafting_files(scenario)
        found = [self.base.parent / name for name in named if name is not None]
        drafts = scenario.engine.speculative_config
        for model in (scenario.model, drafts and drafts.model):
            if model:
                path = self.base.parent / model
                folder = path.parent if model.endswith(FILES) else path
                own = folder / CONFIG, folder / GENERATION_CONFIG
                found += [file for file in own if file.is_file()]
        return found


@lru_cache(maxsize=64)
def _file_hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def evaluate(point: Point) -> dict[str, Any]:
    """Simulate a point: a pure function of it.

    Returns `{"key", "seed", "requests", "error": None, "summary", "pressure", "drift", "engine"}`;
    one that does not start has its reason under `error` and nothing else.
    """
    named = {"key": point.key, "seed": point.seed}
    loaded = LoadedScenario(point.scenario, point.base, point.key)
    try:
        deployment = build(loaded, point.profile)
    except InputError as error:
        return {**named, "error": str(error)}
    table = build_requests(point.scenario, point.base.parent, point.seed, lambda line: None)
    if point.requests is not None and point.requests < len(table):
        table = table.head(point.requests)
    speculation = speculation_for(deployment, point.scenario, point.base.parent, point.seed)
    fleet = fleet_of(point.scenario)
    trace = deployment.simulate(table, fleet=fleet, speculation=speculation).trace
    facts = replace(run_facts(loaded, deployment, point.seed), version=point.version)
    return {
        **named,
        "requests": len(table),
        "error": None,
        "summary": summarise(trace, facts),
        "pressure": pressure(trace, deployment.limits),
        "drift": drift(trace),
        "engine": deployment.engine,
    }


def drift(trace: Trace) -> float:
    """Seconds by which the time to first token grows for each second of arrivals.

    The slope over the second half of the completed requests; near 0 where the load is served,
    above it where a queue builds up that a longer run would show.
    """
    rows = trace.requests
    done = rows["first_token_ns"] >= 0
    sent = rows["arrival_ns"][done] / NS_PER_S
    late = rows["first_token_ns"][done] / NS_PER_S - sent
    half = np.argsort(sent, kind="stable")[len(sent) // 2 :]
    if len(half) < 8 or np.ptp(sent[half]) == 0:
        return 0.0
    return float(np.polyfit(sent[half], late[half], 1)[0])


def pressure(trace: Trace, limits: SchedulerLimits) -> dict[str, float]:
    """What held requests back: shares of the time in steps.

    `waiting`: somebody waited at the end of the step. Of that time, `slots`: all sequence slots
    were taken; `kv`: the pool was; `budget`: the step's tokens were. `peak_running` is a number of
    sequences, `largest_step` a number of tokens.
    """
    steps = trace.steps
    spans = (steps["end_ns"] - steps["start_ns"]).astype(float)
    total = spans.sum()
    tokens = steps["prefill_tokens"] + steps["decode_tokens"]
    queued = steps["waiting"] > 0
    held = {
        "waiting": queued,
        "slots": queued & (steps["running"] >= limits.max_num_seqs),
        "kv": queued & (steps["kv_blocks"] >= AT_THE_LIMIT * trace.kv_blocks),
        "budget": queued & (tokens >= AT_THE_LIMIT * limits.max_num_batched_tokens),
    }
    return {
        **{name: float(spans[rows].sum() / total) if total else 0.0 for name, rows in held.items()},
        "peak_running": float(np.max(steps["running"], initial=0)),
        "largest_step": float(np.max(tokens, initial=0)),
    }
