"""The policy as a Megatron-Core model: building, layers, families, adapters, weights."""
