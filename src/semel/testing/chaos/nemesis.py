"""Faults of the store itself."""
