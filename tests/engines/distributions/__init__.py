"""Whether recorded log-probabilities are what they say, per engine and setting: see `__main__`."""
