"""One file an architecture. Each module here defines `RECIPE` (or `RECIPES`, a tuple of them)."""
