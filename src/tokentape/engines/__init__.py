"""Engines: tokens in, tokens out. One module per backend, each imported only when it is used."""
