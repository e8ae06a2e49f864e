"""What to write here in place of what other trainers call things: said where a user is about to find out."""
