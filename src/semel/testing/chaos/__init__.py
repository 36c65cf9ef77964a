"""Chaos."""
