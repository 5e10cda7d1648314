"""Building blocks of the converted modules. No block knows a model's name or the runner that calls it."""
