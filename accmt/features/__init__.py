"""Features of runs besides training: one file per feature, called through the hooks of `accmt.run.features`.

The loop calls hooks and does not depend on features; `accmt.features.listed` lists them in calling order.
"""
