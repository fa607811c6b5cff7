"""Tokenizers changed at random, to test `tokentape audit` and `tokentape check` against brute force.

A model's files are read (`files`), one or two places in them are changed (`drawing`, `edits`), and plain `tokenizers`
and transformers decide by brute force whether the two folders still do the same (`oracle`, `texts`). The audit must
not call a folder clean that differs, or a server of it (`served`), and undoing the part it names must make the sides
equal (`undo`, `judge`).
Folders that are written differently and provably do the same (`harmless`) must give no alarm.

    python -m tests.audit.mutator --count 500 --out mutants.jsonl
"""
