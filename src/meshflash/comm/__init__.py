"""Communication between ranks: transports for messages, the symmetric heap, and the host handshake."""
