"""Microbenchmarks that run on the device to be calibrated, in a process of their own.

`worker.py` answers requests for single measurements, a JSON line each; the operators it knows are
in `operators.py`, `attention.py` and, on a CPU that has vLLM, `vllm_cpu.py`; `timing.py` says how
long one takes. `engine.py` drives a real engine. Only here is torch imported, and nothing of it is
imported by the rest: the process may run in another Python, the one that will serve.
"""
