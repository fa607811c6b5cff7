"""Random completions for every available template, and properties of any parser's reply to them."""
