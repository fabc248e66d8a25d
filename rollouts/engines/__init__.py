"""Inference engines behind one contract (``base``)."""
