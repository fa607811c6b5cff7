"""Measure drift: how often encoding the text of sampled ids gives different ids, and what that would cost."""
