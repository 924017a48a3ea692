"""Implementations of the op contract, one module each, and the choice between them."""
