"""Coefficients from measurements, and predictions held against them.

Read first: `profile.py` (what a device's coefficients are, and which are used when nothing was
measured), then `fit.py` and `store.py` (tables of kernels to a profile, and its file), read by
`aiconfigurator.py` and `llmservingsim.py`; `spread.py` (how sure a step's time is) and
`measured.py` (recorded serving runs). Nothing here knows the simulator.
"""
