"""A canary: a random share of one deployment's requests goes to another."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from servecast.costmodels.errors import InputError
from servecast.reports.metrics import summarise
from servecast.scenarios.build import build, speculation_for
from servecast.scenarios.load import LoadedScenario
from servecast.scenarios.paired import sla_met, sla_rows, spreads
from servecast.scenarios.run import fleet_of, run_facts
from servecast.scenarios.sweep import Result
from servecast.scenarios.workload import build_requests
from servecast.sim.request import RequestTable
from servecast.sim.rng import stream


def canary_shares(
    a: LoadedScenario, b: LoadedScenario, share: float, seeds: Sequence[int]
) -> dict[str, Any]:
    """What each side sees when B gets a share of A's requests, and A keeps the rest.

    `{share, a, b}`; a side has `requests` (mean), `metrics` (of `spreads`), `sla` and `sla_met`.

    Raises InputError where a side gets no request.
    """
    sides = (a, b)
    deployments = [build(side) for side in sides]
    found: tuple[list[Result], list[Result]] = ([], [])
    for seed in seeds:
        table = build_requests(a.scenario, a.path.parent, seed, lambda line: None)
        parts = split(table, share, seed)
        if not all(len(part) for part in parts):
            raise InputError(
                f"--canary {share:g}: of {len(table):,} requests one side gets none with seed "
                f"{seed}; give more requests or a larger share"
            )
        for side, deployment, part, kept in zip(sides, deployments, parts, found, strict=True):
            speculation = speculation_for(deployment, side.scenario, side.path.parent, seed)
            fleet = fleet_of(side.scenario)
            trace = deployment.simulate(part, fleet=fleet, speculation=speculation).trace
            facts = run_facts(side, deployment, seed)
            kept.append({"summary": summarise(trace, facts)})
    told = [
        {
            "requests": float(np.mean([r["summary"]["requests"]["sent"] for r in results])),
            "metrics": spreads(results),
            "sla": sla_rows(results),
            "sla_met": sla_met(results),
        }
        for results in found
    ]
    return {"share": share, "a": told[0], "b": told[1]}


def split(table: RequestTable, share: float, seed: int) -> tuple[RequestTable, RequestTable]:
    """The requests that stay, and a random share of them: by index, the same for the same seed.

    A session stays together, with its first request. The clients of a closed loop are shared out
    in proportion, at least one to each side.
    """
    chosen = stream(seed, "canary").random(len(table)) < share
    if table.after is not None:
        for row, before in enumerate(table.after.tolist()):
            if before >= 0:
                chosen[row] = chosen[before]
    return _part(table, ~chosen, 1 - share), _part(table, chosen, share)


def _part(table: RequestTable, chosen: npt.NDArray[np.bool_], share: float) -> RequestTable:
    rows = np.flatnonzero(chosen)
    after = table.after
    if after is not None:
        position = np.cumsum(chosen) - 1
        after = np.where(after[rows] >= 0, position[after[rows]], -1)
    clients = table.concurrency
    return replace(
        table,
        arrival_ns=table.arrival_ns[rows],
        prompt_tokens=table.prompt_tokens[rows],
        output_tokens=table.output_tokens[rows],
        priority=table.priority[rows],
        klass=table.klass[rows],
        segment_id=table.segment_id[rows],
        shared=None if table.shared is None else [table.shared[row] for row in rows.tolist()],
        after=after,
        think_ns=None if table.think_ns is None else table.think_ns[rows],
        concurrency=None if clients is None else max(1, round(clients * share)),
    )
