"""The `tokentape` command: one module per subcommand. Data goes to stdout, everything else to stderr.

Exit codes: 0 for success, 1 for findings, 2 for errors, 3 if nothing was measured. Nothing heavy is imported before a
subcommand runs, so that `tokentape --help` answers at once.
"""

from tokentape.cli.app import app, main

__all__ = ["app", "main"]
