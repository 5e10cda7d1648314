"""Decoders: requests that come and go, a paged cache they share, and what is sampled from their logits."""
