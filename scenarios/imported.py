"""`servecast calibrate --from`: which reader, which folder, which device."""

from pathlib import Path

from servecast.calibration import aiconfigurator, llmservingsim
from servecast.calibration.store import KernelProfile
from servecast.costmodels.catalogue import load_hardware
from servecast.costmodels.errors import InputError

READERS = {
    "aiconfigurator": (aiconfigurator.fit_system, aiconfigurator.SYSTEMS),
    "llmservingsim": (llmservingsim.fit_system, llmservingsim.SYSTEMS),
}


def fit_tables(
    path: Path | None, source: str | None, system: str | None, hardware: str | None
) -> KernelProfile:
    """Fit the tables of one GPU.

    Raises InputError for whatever is missing or cannot be read.
    """
    if source is None or path is None:
        raise InputError(f"calibrate: give --from {'|'.join(READERS)} and a folder, or --show")
    if source not in READERS:
        raise InputError(f"--from {source}: not known; one of {', '.join(READERS)}")
    fit, systems = READERS[source]
    if not path.is_dir():
        raise InputError(f"{path}: no folder of tables")
    if system is None:
        found = [name for name in systems if (path / name).is_dir() or path.name == name]
        if len(found) != 1:
            raise InputError(f"--system: name one of {', '.join(found or systems)}")
        system = found[0]
    device = hardware or systems.get(system)
    if device is None:
        raise InputError(f"--system {system}: name its device with --hardware")
    folder = path if path.name == system else path / system
    if not folder.is_dir():
        raise InputError(f"{folder}: no tables of {system}")
    spec = load_hardware(device)
    return fit(folder, spec, spec.name)
