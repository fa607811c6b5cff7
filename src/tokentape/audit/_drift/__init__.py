"""Measure drift: how often encoding the text of sampled ids gives other ids, and what that would cost."""
