"""Collectives between the ranks."""
