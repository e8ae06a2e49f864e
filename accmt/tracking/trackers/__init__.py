"""The core trackers, one file each; `accmt.registry` lists all trackers."""
