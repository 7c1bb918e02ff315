"""Variations of one scenario, run in a sweep."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from servecast.calibration.profile import GENERIC, Profile
from servecast.scenarios.factors import change
from servecast.scenarios.load import LoadedScenario
from servecast.scenarios.points import Point
from servecast.scenarios.sweep import Sweep


@dataclass(frozen=True)
class Runner:
    """Runs a scenario with changes, on the same requests each time."""

    loaded: LoadedScenario
    sweep: Sweep

    @property
    def seed(self) -> int:
        """The scenario's own."""
        return self.loaded.scenario.seed

    def point(
        self,
        changes: Mapping[str, Any],
        *,
        seed: int | None = None,
        requests: int | None = None,
        profile: Profile = GENERIC,
    ) -> Point:
        """The point of some changes. Raises InputError if they are not valid."""
        scenario = change(self.loaded.scenario, changes)
        seed = self.seed if seed is None else seed
        return Point(scenario, self.loaded.path, seed, requests, profile)

    def run(
        self,
        changes: Iterable[Mapping[str, Any]],
        *,
        seed: int | None = None,
        requests: int | None = None,
        profile: Profile = GENERIC,
    ) -> list[dict[str, Any]]:
        """Results of several changes, in their order."""
        points = (self.point(c, seed=seed, requests=requests, profile=profile) for c in changes)
        return list(self.sweep.run(points))
