"""The comparator: where two id sequences that should be equal differ, and in what way."""
