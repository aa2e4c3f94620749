"""The learner: Megatron-Core as the one engine that differentiates, reduces and steps. The only room that imports it."""

import warnings

# Megatron-Core warns once per optional package at import; each is chosen or refused by configuration instead.
warnings.filterwarnings("ignore", module=r"megatron\.core.*")
