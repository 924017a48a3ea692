"""Workers and model runners: orchestration only."""
