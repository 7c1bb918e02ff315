"""Pure functions of a model, a device and a step: bytes, blocks and seconds.

Nothing here knows of requests, queues or time passing, and only numpy (and PyYAML, for the
catalogue) is imported. Read these three first:

1. `shape.py`: what a step contains, what it costs, and the `CostModel` protocol.
2. `roofline.py`: the cost model of a GPU, built on the coefficients of `operators.py`
   (`efficiency.py` says how far they stay below the datasheet, `collectives.py` and `graphs.py`
   what communication and CUDA-graph padding add).
3. `memory.py`: vLLM's start-up, from weights to blocks.

Beneath them: `specs.py` names the facts of a model and a device, `weights.py` counts matrices,
parameters and bytes, `hf_config.py` and `quantization.py` read a Hugging Face config.json, and
`catalogue.py` finds the bundled ones in `models.yaml` and `hardware.yaml`.

Another device is another class with the two methods of `CostModel`.
"""
