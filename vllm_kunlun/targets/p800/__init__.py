"""Driver of the p800 target: what the vendor's software can do, as data, and which of it is installed."""
