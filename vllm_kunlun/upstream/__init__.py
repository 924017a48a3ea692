"""The only place that touches vLLM or torch internals: version differences and the ledger of patches."""
