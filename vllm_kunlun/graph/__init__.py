"""Kunlun Graph: a step captured once and replayed without Python per op."""
