"""Random numbers by name: one stream a purpose, one position in it a request.

A draw added for one purpose moves nothing in another, and request i reads position i of
every stream whatever else is configured. Runs that differ in one setting therefore meet the
same luck (common random numbers), and their difference is the setting's.
"""

import zlib

import numpy as np


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The Philox stream of one purpose, the same on every machine and in every process.

    Parameters
    ----------
    seed : at least 0; replications use different ones
    purpose : what the numbers are for, such as "arrivals"; distinct names give independent
        streams (the name's CRC-32 is the spawn key of numpy's SeedSequence)
    """
    key = zlib.crc32(purpose.encode())
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(key,))))
