"""What a run can do besides training: one file per feature, each behind the hooks of `accmt.features.hooks`.

The loop calls hooks and knows no feature; `accmt.features.listed` names them all, in the order in which they act.
"""
