"""The flight recorder: a ledger of what each step computed, from which any step can be made again and compared."""
