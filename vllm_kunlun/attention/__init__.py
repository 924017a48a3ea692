"""Attention backends: metadata once per step, one op per layer."""
