"""Compares a model as it is served, from an export or by a server, with the model that was trained."""
