"""Gradients in buckets, averaged during the backward pass."""
