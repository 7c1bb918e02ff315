"""Answers from the record of a run: a trace goes in, tables, numbers and a page come out.

Read these three first:

1. `metrics.py`: `RunFacts`, and `summarise`, which makes `summary.json` of a trace.
2. `latencies.py`: what TTFT, ITL, TPOT, E2E and queue time are; `quantiles.py` holds the weighted
   sample that their percentiles rest on.
3. `html.py`: the report from its top, with `sections.py` below it and `page.py` around it.
   `figures.py` draws the panels; `timeline.py` bins what they show over time, `svg.py` makes them
   small.

The pages of the other commands: `sizing_html.py` (`size`; its sentences in `sizing_words.py`, its
figures in `sizing_heatmap.py` and `sizing_figures.py`), `whatif_html.py` (`whatif`, `compare`),
`profile_html.py` (`calibrate --show`, figures in `profile_figures.py`) and `validation_html.py`.

Beside them: `console.py` is the summary on a terminal, `tables.py` writes the facts themselves as
Parquet, `files.py` sees that a file is whole or not there, and `units.py` writes numbers as people
read them. Nothing here simulates, and Matplotlib, pyarrow, scipy and rich are imported only where
they are used.
"""
