"""Transports: how bytes move between ranks. None of them knows what the bytes mean."""
