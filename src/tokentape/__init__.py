"""Tokentape: train on exactly the tokens your model sampled."""

__version__ = "0.1.0.dev0"
