"""Keep one agent's turns as an append-only tree: match, fork, check, and flatten to trajectories."""
