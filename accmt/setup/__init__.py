"""Builds a run: finds and checks data, module and settings, and prepares them before the first step."""
