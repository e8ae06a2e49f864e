"""The command `accmt`."""
