"""The training side: samples that are exactly what was sampled, batches of them, files, other trainers' formats."""
