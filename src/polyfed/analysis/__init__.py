"""Tools to look at trained models and at what leaves a client."""
