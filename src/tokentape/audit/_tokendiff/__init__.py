"""Find where two sequences of token ids differ, and classify each difference."""
