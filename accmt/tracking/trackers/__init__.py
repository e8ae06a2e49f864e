"""The tracker of the core; `accmt.registry` lists all trackers."""
