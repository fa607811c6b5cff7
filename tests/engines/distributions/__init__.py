"""Compare recorded log-probabilities with their declared distributions, per engine and setting: see `__main__`."""
