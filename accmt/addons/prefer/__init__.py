"""Preference tuning, reward models and distillation."""
