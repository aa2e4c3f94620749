"""Named gradient accumulators in the layout of Megatron's gradient buffers: `layout`, `arithmetic`, `store`."""
