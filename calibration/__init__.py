"""Coefficients from measurements, and predictions held against them.

Read first: `profile.py` (what a device's coefficients are, and which are used when nothing was
measured), then `fit.py` and `store.py` (rows of kernels to a profile, and its file). Rows come from
tables of others (`aiconfigurator.py`, `llmservingsim.py`, `vidur.py`) or from the device at hand:
`calibrating.py` is the campaign, `shapes.py` what is measured, `measuring.py` the worker and the
time budget, `device_profile.py` what becomes of it, `engines.py` real engines and their host time,
`device/` what runs beside torch. `spread.py` says how sure a step's time is, `measured.py` reads
recorded serving runs, and `acceptance.py` fits how drafts are accepted. Nothing here knows the
simulator.
"""
