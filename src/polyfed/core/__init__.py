"""The core: messages, parties, methods, stages, the round loop."""
