"""The learner room: Megatron-Core, gradients as they become possible, one exact step."""
