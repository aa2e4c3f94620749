"""The learner room: Megatron-Core, gradients as they become possible, one exact step."""

import warnings

# Megatron-Core warns once per optional package at import; each is chosen or refused by configuration instead.
warnings.filterwarnings("ignore", module=r"megatron\.core.*")
