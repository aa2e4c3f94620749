"""SGLang plug-in: every request samples with a seed of its own on the CPU path.

    token = first index whose cumulative probability exceeds u,   u = hash(sampling_seed, position) in [0, 1)

SGLang honours `sampling_seed` only with --enable-deterministic-inference, which refuses the CPU attention backend, and
its seeded draw is compiled with triton. The sampler itself takes seeds anywhere, so this plug-in fills them in and
draws by inversion. A request without a seed gets one from its id, the same on every tensor-parallel rank (SGLang's
default is one constant for all of them).
The same request with the same seed draws the same tokens up to rounding: the batch it runs in moves its logits by 1e-6.
"""

from __future__ import annotations

import hashlib

import torch

MASK_64 = (1 << 64) - 1


def install() -> None:
    """Entry point of group `sglang.srt.plugins`; runs in each of the server's processes before it serves."""
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    original = SamplingBatchInfo.from_schedule_batch.__func__

    def from_schedule_batch(cls: type, batch: object, vocab_size: int) -> SamplingBatchInfo:
        info = original(cls, batch, vocab_size)
        seeds = [(request.sampling_params.sampling_seed, request.rid) for request in batch.reqs]
        info.sampling_seed = torch.tensor(
            [seed_of(rid) if seed is None else seed for seed, rid in seeds], dtype=torch.int64
        )
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
    sampler.multinomial_with_seed = draw
    sampling = sampler.top_k_top_p_min_p_sampling_from_probs_torch

    def sample(
        probs: torch.Tensor,
        top_ks: torch.Tensor,
        top_ps: torch.Tensor,
        min_ps: torch.Tensor,
        need_min_p_sampling: bool,
        sampling_seed: torch.Tensor | None,
        positions: torch.Tensor,
        **options: object,
    ) -> torch.Tensor:
        if need_min_p_sampling:  # SGLang refuses min-p with seeds: its own draw needs normalised rows, ours does not
            probs = without_unlikely(probs, min_ps)
        if sampling_seed is None or options.get("return_filtered_probs"):
            return sampling(probs, top_ks, top_ps, min_ps, False, sampling_seed, positions, **options)
        kept = within_top(probs, top_ks, top_ps)
        return draw(kept.log(), sampling_seed, positions).view(-1).to(torch.int32)

    sampler.top_k_top_p_min_p_sampling_from_probs_torch = sample


def within_top(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """`probs` [N, V] with what is outside of top_ks [N] and top_ps [N] at 0, each token in its place: a row draws the
    same token whether or not another row of its batch has a limit. SGLang draws from sorted rows where any has one."""
    ordered, index = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    outside = (torch.arange(probs.shape[-1]) >= top_ks.view(-1, 1)) | (before > top_ps.view(-1, 1))
    return torch.zeros_like(probs).scatter_(-1, index, ordered.masked_fill_(outside, 0.0))


def without_unlikely(probs: torch.Tensor, min_ps: torch.Tensor) -> torch.Tensor:
    """`probs` [N, V] with tokens below min_p times the row's largest at 0. They are the tail, so that top-k and top-p,
    which cut the tail too, keep the same tokens before or after."""
    return probs.masked_fill(probs < probs.amax(dim=-1, keepdim=True) * min_ps.view(-1, 1), 0.0)


def seed_of(rid: str) -> int:
    """62 bits from a request's id, which is unique unless its sender chose otherwise."""
    return int.from_bytes(hashlib.blake2b(str(rid).encode(), digest_size=8).digest(), "little") >> 2


def draw(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token a row by inversion, never one of probability 0: logprobs [N, V], seed [N], positions [N] -> [N, 1]."""
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    pairs = zip(seed.tolist(), positions.tolist())
    u = torch.tensor([uniform(s, p) for s, p in pairs], dtype=torch.float64)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, u, right=True)


def uniform(seed: int, position: int) -> float:
    """53 random bits in [0, 1) from (seed, position): two rounds of splitmix64."""
    return (_splitmix(_splitmix(seed & MASK_64) ^ (position & MASK_64)) >> 11) / (1 << 53)


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)
