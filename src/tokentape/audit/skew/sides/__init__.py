"""What can be audited: one module per way to tokenize and render, all behind `Side`."""
