"""The same work by TRL and tunix, on the same weights and rows, in one run."""
