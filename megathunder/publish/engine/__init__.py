"""The part of publication that runs inside a rollout server: our weight loader and what it needs. No Megatron here."""
