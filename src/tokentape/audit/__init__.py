"""The audit side: is what trains tokenized as what serves, how often do ids drift, and where do two records differ."""
