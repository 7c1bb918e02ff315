"""Coefficients from measurements, and predictions held against them.

Read first: `profile.py` (what a device's coefficients are, and which are used when nothing was
measured), then `measured.py` (recorded serving runs, and the error of a prediction). Nothing
here knows the simulator.
"""
