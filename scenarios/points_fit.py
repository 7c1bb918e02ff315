"""`servecast calibrate --from points`: constants of SRAM devices from speeds that users saw."""

from pathlib import Path
from typing import Any

from servecast.calibration.fabric import (
    FabricFit,
    fabric_text,
    fit_fabric,
    held_against,
    read_points,
)
from servecast.costmodels.errors import InputError
from servecast.reports.files import write_text


def fit_points(path: Path | None, system: str | None, out: Path | None) -> dict[str, Any]:
    """Fit the speeds of one device that no drafts made, hold all of them against the fit, and write
    it as a profile.

    `{profile, hardware, constants, points, notes}`, fit for JSON; rows of `points` are those of
    `held_against`. Raises InputError for a file that cannot be read or fitted.
    """
    if path is None:
        raise InputError("--from points: give the CSV of points")
    points, notes = read_points(path)
    plain = [point for point in points if point.drafts == "no"]
    if system is not None:
        plain = [point for point in plain if point.hardware == system]
    if not plain:
        why = f" ({'; '.join(notes[:3])})" if notes else ""
        raise InputError(f"{path}: no speed without drafts{f' of {system}' if system else ''}{why}")
    hardware = plain[0].hardware
    try:
        fit: FabricFit = fit_fabric(
            [point for point in plain if point.hardware == hardware], path.stem, str(path)
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    profile = out or Path(f"{hardware}.yaml")
    write_text(profile, fabric_text(fit))
    return {
        "profile": str(profile),
        "hardware": hardware,
        "constants": vars(fit.constants),
        "points": held_against(fit, points),
        "notes": notes,
    }
