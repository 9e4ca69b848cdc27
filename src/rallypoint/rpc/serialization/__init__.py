"""Serialization of messages: pickles, tensors and TorchScript functions, and the names they may contain."""
