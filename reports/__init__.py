"""Answers from the record of a run: a trace goes in, tables, numbers and a page come out.

Read these three first:

1. `metrics.py`: `RunFacts`, and `summarise`, the one place where a metric is defined.
2. `quantiles.py`: percentiles of a weighted sample, on which all latencies rest.
3. `html.py`: the report; `figures.py` draws its panels (`timeline.py` bins what they show over
   time, `svg.py` makes them small), `page.py` is its style.

Beside them: `console.py` is the summary on a terminal, `tables.py` writes the facts themselves as
Parquet, `files.py` sees that a file is whole or not there, and `units.py` writes numbers as people
read them. Nothing here simulates, and Matplotlib, pyarrow, scipy and rich are imported only where
they are used.
"""
