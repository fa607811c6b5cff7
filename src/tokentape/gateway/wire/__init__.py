"""The protocols that agents speak: what their requests ask for, and how they are told the reply."""
