"""Transports: how bytes move between ranks. No transport knows what the bytes mean."""
