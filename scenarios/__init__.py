"""From a question in YAML to a decision: the top layer, which composes all others.

Read in this order:

1. `schema`: what may stand in a scenario, with every field described; `slas` its clauses
2. `yamlfile`, `load`: strict YAML to a checked Scenario, every error one line with its place
3. `workload`: the load of a scenario as a `RequestTable`; `arrivals` and `lengths` draw it,
   `traces` (over `columns`) reads recorded ones
4. `build`, `run`, `cli`: the other objects of a simulation, one run, the command line

To add a kind of arrival or length: one model with its `kind` in `schema`, one branch in
`arrivals` or `lengths`. To add a trace format: one row of `traces.LAYOUTS`.
`library/` holds scenarios to start from; `scenario.schema.json` is `to_json_schema()`, for
editors.
"""
