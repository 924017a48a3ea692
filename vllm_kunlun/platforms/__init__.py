"""Platform layer: target choice, environment table and versions (standard library only), then the platform itself.

This package file stays empty of imports so that `probe`, `envs` and `version` load without torch and vLLM.
"""
