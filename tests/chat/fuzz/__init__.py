"""Random completions for every template at hand, and what must hold of any parser's reply to them."""
