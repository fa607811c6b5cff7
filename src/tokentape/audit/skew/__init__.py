"""The skew auditor: whether two sides map the same texts and messages to the same ids, and if not, why."""
