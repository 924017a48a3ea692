"""Runs the op contract on whatever this machine serves with, and says what is right, wrong and how fast."""
