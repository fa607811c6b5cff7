"""The `tokentape` command: one module per subcommand. Data goes to stdout, everything else to stderr.

Exit codes: 0 for success, 1 for findings or a failure, 2 for a command line that makes no sense. Nothing heavy is
imported before a subcommand runs, so that `tokentape --help` answers at once.
"""

from tokentape.cli.app import app, main

__all__ = ["app", "main"]
