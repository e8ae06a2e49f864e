"""For people from other trainers: what to write here."""
