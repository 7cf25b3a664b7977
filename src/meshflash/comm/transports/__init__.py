"""Transports: they move bytes between ranks, and do not know what the bytes mean."""
