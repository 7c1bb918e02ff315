"""Spaces too large to try one by one: Optuna proposes, short runs answer."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from servecast.costmodels.errors import InputError

Changes = dict[str, Any]

#: Proposals asked for at once, so that workers have something to do.
BATCH = 16


def explore(
    knobs: dict[str, Sequence[Any]],
    trials: int,
    score: Callable[[list[Changes]], list[float]],
    *,
    seed: int,
    journal: Path | None,
    name: str,
) -> list[Changes]:
    """Distinct combinations of knobs that were tried, by a tree-structured Parzen estimator.

    Parameters
    ----------
    score : higher is better, of each combination of a batch
    journal : a file that several machines may share as the state of the search (Optuna's journal
        storage); None keeps it in memory
    name : of the study in the journal

    Raises InputError if Optuna is not installed.
    """
    try:
        optuna: Any = import_module("optuna")
        storages: Any = import_module("optuna.storages.journal")
    except ImportError:
        raise InputError(
            "this many candidates need Optuna: pip install 'servecast[optuna]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = None
    if journal is not None:
        backend = storages.JournalFileBackend(str(journal))
        storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        storage=storage,
        study_name=name,
        load_if_exists=True,
    )
    # Optuna keeps categories that are plain values; ours may be blocks, so it gets their places.
    places = {
        key: optuna.distributions.IntDistribution(0, len(values) - 1)
        for key, values in knobs.items()
    }
    done = len(study.trials)
    while done < trials:
        asked = [study.ask(places) for _ in range(min(BATCH, trials - done))]
        batch = [{k: knobs[k][trial.params[k]] for k in knobs} for trial in asked]
        for trial, value in zip(asked, score(batch), strict=True):
            study.tell(trial, value)
        done += len(asked)
    tried: dict[tuple[int, ...], Changes] = {}
    for trial in study.trials:
        if trial.value is not None:
            at = tuple(trial.params[key] for key in knobs)
            tried[at] = {key: knobs[key][place] for key, place in zip(knobs, at, strict=True)}
    return list(tried.values())
