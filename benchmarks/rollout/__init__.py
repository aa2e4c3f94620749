"""Measurements of benchmarks/bench_rollout.py, and the parts they share: servers, CPU seconds, traces of requests."""
