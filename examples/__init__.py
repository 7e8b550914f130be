"""A real decoding loop on small byte-level transformers: train, draft, verify."""
