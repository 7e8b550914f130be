"""Adapters for inference engines. Nothing else in this package knows an engine."""
