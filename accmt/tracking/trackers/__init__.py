"""The trackers of the core, one file each; `accmt.registry` names all trackers."""
