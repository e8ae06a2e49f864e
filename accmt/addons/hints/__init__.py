"""Migration hints: what to write in accmt instead of arguments and methods of other trainers."""
