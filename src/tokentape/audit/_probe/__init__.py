"""Probe a model for phantom edits: asked to replace a word, it returns the same word with different ids."""
