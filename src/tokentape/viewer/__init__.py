"""The viewer: token-level trajectories on a page, from a running gateway or from files."""
