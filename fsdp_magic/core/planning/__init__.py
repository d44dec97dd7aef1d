"""PURE: from the trace of one training step to bytes on a rank over time; standard library only."""
