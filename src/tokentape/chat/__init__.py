"""One model's messages <-> token ids: render, bridge, parse, all read off its own chat template."""
