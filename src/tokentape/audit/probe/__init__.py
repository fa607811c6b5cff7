"""The tokenization-consistency probe: whether a model that is to replace a word gives the same word in other ids.

`trials` makes the tasks, `running` samples them from any engine, `outcomes` reads the ids, `record` keeps results so
that a probe can be resumed, `summary` counts.
"""
