"""Measurements behind ``vllm-kunlun bench``: this server and its peers, over real HTTP."""
